"""Experiments with hoglib: ``python -m experiments fit --config configs/...``.

Each config trains one LightningModule; ``python -m experiments list`` says what each shows. An
experiment is a folder, which imports `shared/` and no other experiment:

    experiment.py    the module, a subclass of `shared.experiment.Experiment`
    table.py         its result as text, by `shared.layout.table`
    plots.py         its pictures
    ...              its data and networks, where no other experiment uses them
    __init__.py      exports what configs name

What several experiments use:

    shared/      data sets, networks, base classes, schedules, style of pictures and tables
    command/     the command line: options, errors, checkpoints, progress bar, verify and spectrum
    runs.py      the folder of a run: checkpoints, summaries, reports
    logs.py      metrics.csv: the logger, and reading it
    checks.py    checks of options
    configs.py   what stands in the first lines of configs; configs of `smoke`, which change another one

`benchmarks/` compares hoglib with torch by hand and with other libraries: ``make bench``.
"""
