"""Experiments with hoglib: ``python -m experiments fit --config configs/...``.

Each config trains one LightningModule. The modules, one file for each experiment:

    maml.py         MAML on sinusoids, and joint training beside it   configs/maml/sinusoid*.yaml
    few_shot.py     few-shot classification of glyphs                 configs/maml/glyphs_*.yaml
    reweight.py     learning to reweight mislabelled examples         configs/meta/reweight_digits.yaml
    data_values.py  values of digits through a whole training         configs/meta/data_values.yaml
    gan.py          GAN in the plane                                  configs/gan/mixture.yaml
    image_gan.py    GAN of MNIST digits                               configs/gan/mnist.yaml
    robust.py       classifiers under adversarial attack              configs/penalty/digits_robust.yaml
    forces.py       potentials learned from energies and forces       configs/penalty/forces.yaml
    curvature.py    gradient descent and the spectrum of its Hessian  configs/curvature/digits.yaml
    influence.py    training digits behind a classifier's errors      configs/curvature/influence.yaml
    autoencoder.py  NewtonCG beside Adam                              configs/curvature/newton_cg.yaml
    pinn.py         Poisson's equation and a clamped plate            configs/pinn/*.yaml

What they share:

    command/     the command line: arguments, checkpoints, progress bar, verify and spectrum
    data/        datamodules, and the data sets that come with the repository
    models/      networks
    training/    base class, learners, the adversarial game, schedules, compiled losses
    evaluation/  adversarial attacks, and scores of generated samples
    tables/      result tables, as text
    plots/       pictures, in one style
    repeated.py  a training that data_values and influence repeat on subsets
    runs.py      the folder of a run: checkpoints, summaries, reports
    logs.py      metrics.csv: the logger, and reading it
    checks.py    checks of options

`benchmarks/` compares hoglib with torch by hand and with other libraries: ``make bench``.
"""
