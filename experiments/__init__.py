"""Experiments with hoglib: ``python -m experiments fit --config configs/...``.

Each config trains one LightningModule. An experiment is a folder, or a file where it has no other:

    few_shot/       MAML on sinusoids and on glyphs          configs/maml/*.yaml
    language/       a language model, adapted to topics      configs/curvature/lm.yaml
    reweight.py     learning to reweight wrong labels        configs/meta/reweight_digits.yaml
    data_values/    values of digits through a training      configs/meta/data_values.yaml
    gan/            GANs in the plane and of MNIST digits    configs/gan/*.yaml
    robust/         classifiers under adversarial attack     configs/penalty/digits_robust.yaml
    forces/         potentials from energies and forces      configs/penalty/forces.yaml
    curvature.py    descent and the spectrum of its Hessian  configs/curvature/digits.yaml
    influence/      digits behind a classifier's errors      configs/curvature/influence.yaml
    autoencoder.py  NewtonCG and KFAC beside Adam            configs/curvature/newton_cg.yaml
    pinn/           Poisson, a clamped plate, Allen-Cahn     configs/pinn/*.yaml
    helium/         the ground state of helium               configs/pinn/helium.yaml
    mean_flow/      samples in one step                      configs/flow/*.yaml

A folder has `experiment.py`, the module; `table.py`, its result as text; `plots.py`, its pictures; and
its data and networks. What several experiments use:

    shared/      data sets, networks, base class, schedules, style of pictures and tables
    command/     the command line: arguments, checkpoints, progress bar, verify and spectrum
    runs.py      the folder of a run: checkpoints, summaries, reports
    logs.py      metrics.csv: the logger, and reading it
    checks.py    checks of options

`benchmarks/` compares hoglib with torch by hand and with other libraries: ``make bench``.
"""
