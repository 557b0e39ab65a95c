"""``python -m experiments {list,fit,validate,test,verify,spectrum}``"""

import os
import signal
import sys


def main(args: list[str] | None = None) -> int:
    """Run a command; `list` needs neither torch nor Lightning.

    Args:
        args: The words after ``python -m experiments``. Default: those of the process.
    Returns:
        The exit status, as that of `experiments.command.cli.main`; 2 where a package is not installed;
        141 where the reader of its output has ended.
    """
    try:
        return _run(sys.argv[1:] if args is None else args)
    except ModuleNotFoundError as error:
        needed = (error.name or str(error)).split(".")[0]
        print(
            f"error: {needed} is not installed; install what the experiments need: "
            "pip install '.[experiments]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:  # while torch is imported
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered is written at the end
        print("\nerror: the reader of the output has ended, and so has the run.", file=sys.stderr)
        return 128 + signal.SIGPIPE


def _run(words: list[str]) -> int:
    if words[:1] != ["list"]:
        from experiments.command.cli import main as run

        return run(words)
    if words[1:]:
        print(f"error: list takes no words after it, got {' '.join(words[1:])}", file=sys.stderr)
        return 2
    from experiments.configs import table

    print(table(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
