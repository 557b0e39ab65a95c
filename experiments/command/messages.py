"""Errors of the command line in one paragraph."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import accumulate
from pkgutil import iter_modules

from hoglib._core.messages.validation import did_you_mean

ADVICE = " Options and their types: python -m experiments fit --help"
CONFIGS = (
    "`python -m experiments list` lists the configs; to run one, "
    "`python -m experiments fit --config configs/maml/sinusoid.yaml`."
)
A_LOGGER = "expected false or a class, such as lightning.pytorch.loggers.TensorBoardLogger"
NO_CONFIG = (
    r"are required: \w+\.model$|^config: File does not exist|subcommand|Unexpected config|"
    r"unrecognized arguments: \S+\.ya?ml"
)
# jsonargparse tries each type that an option may have and reports them all; these lines belong to
# the alternatives that the user did not mean.
NOISE = (
    "Expected a <class 'NoneType'>",
    "Given value",
    "Errors:",
    "Subtypes:",
    "Problem with given class_path",
    "Does not validate against any of the Union subtypes",
)


def shorten_parser_error(message: str, options: Sequence[str]) -> str:
    """Reduce an error of jsonargparse to what the user wrote and can correct.

    Args:
        message: The error of jsonargparse.
        options: The options of the parser that raised it, to suggest one of them.
    Returns:
        One paragraph.
    """
    if unknown := re.fullmatch(r"Option '([\w.]+)' is not accepted", message):
        name, known = unknown[1], ", ".join(options) or "class_path, init_args"
        suggestion = _suggest(name, [*options, "init_args"])
        return f"no option {name!r}; expected one of {known}{suggestion}"
    lines = [line.strip().removeprefix("- ") for line in message.replace(ADVICE, "").splitlines()]
    kept = [line for line in lines if line and not any(text in line for text in NOISE)]
    text = " ".join(dict.fromkeys(kept))
    text = re.sub(r'Parser key "([^"]+)":', r"\1:", text)
    if re.search(NO_CONFIG, text):
        # `list` is a command too, which jsonargparse does not know
        text = re.sub(r"(?<=\(choose from )(?='fit')", "'list', ", text).replace(
            "{fit,", "{list,fit,"
        )
        return f"{text.rstrip('.: ')}. {CONFIGS}"
    text = re.sub(r"\. Got value: (.*?)(?= Expected|\.?$)", r", got '\1'", text)
    text = re.sub(r"Expected an? <class '([^']+)'>", r"expected \1", text)
    if text.startswith("trainer.logger:"):  # which may be a class, some, or a bool
        text = re.sub(r"Expected a path but .*? invalid | expected (collections\S+|bool)", "", text)
        text = re.sub(r"Expected a dot import path string: (\S+)", rf"{A_LOGGER}, got '\1'", text)
    unknown = re.search(r"(not accept option '|unrecognized arguments: --)([\w.]+)", text)
    if missing := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text):
        module = import_module(missing[1])
        options = [m.name for m in iter_modules(getattr(module, "__path__", ()))] + dir(module)
    end = "?" if text.endswith("?") else "."
    end = _suggest(found[2], options) if (found := missing or unknown) else end
    return text.rstrip(".?") + end + ADVICE


def _suggest(name: str, options: Sequence[str]) -> str:
    """The end of a sentence: the option near the first part of a dotted name that is none, if any."""
    if "." not in name:
        last = {x.rpartition(".")[2]: x for x in reversed(options)}
        near = [x for part, x in last.items() if part.startswith(name)]
        near += [last[part] for part in get_close_matches(name, last, 1, cutoff=0.85)]
        if near or "model" in options:  # whose options are those of its class
            found = repr(near[0]) if near else f"'model.{name}' or 'data.{name}'"
            return f"; did you mean {found}?"
    parts = accumulate(name.split("."), "{}.{}".format)  # a, a.b and a.b.c of a.b.c
    return did_you_mean(next((x for x in parts if x not in options), name), options)
