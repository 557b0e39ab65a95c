"""``python -m experiments {list,fit,validate,test,verify,spectrum}``"""

import sys


def main(args: list[str] | None = None) -> int:
    """Run a command; `list` needs neither torch nor Lightning.

    Args:
        args: The words after ``python -m experiments``. Default: those of the process.
    Returns:
        The exit status, as that of `experiments.command.cli.main`; 2 where a package is not installed.
    """
    words = sys.argv[1:] if args is None else args
    if words[:1] == ["list"]:
        if words[1:]:
            print(
                f"error: list takes no words after it, got {' '.join(words[1:])}", file=sys.stderr
            )
            return 2
        from experiments.configs import table

        print(table())
        return 0
    try:
        from experiments.command.cli import main as run

        return run(args)
    except ModuleNotFoundError as error:
        needed = (error.name or str(error)).split(".")[0]
        print(
            f"error: {needed} is not installed; install what the experiments need: "
            "pip install '.[experiments]'",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
