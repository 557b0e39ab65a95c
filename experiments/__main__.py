"""``python -m experiments {list,fit,validate,test,verify,spectrum}``"""

import sys


def main(args: list[str] | None = None) -> int:
    """Run a command; `list` needs neither torch nor Lightning.

    Args:
        args: The words after ``python -m experiments``. Default: those of the process.
    Returns:
        The exit status, as that of `experiments.command.cli.main`.
    """
    if (sys.argv[1:] if args is None else args) == ["list"]:
        from experiments.configs import table

        print(table())
        return 0
    from experiments.command.cli import main as run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
