"""What an index of packages shows: README.md without pictures and links into the checkout."""

import re
from pathlib import Path

from setuptools import setup

text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", Path("README.md").read_text())
setup(
    long_description=re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text),
    long_description_content_type="text/markdown",
)
