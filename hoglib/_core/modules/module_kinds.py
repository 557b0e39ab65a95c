"""Private bases of torch's public layers, from which users derive their own, too."""

from hoglib._core.torch_api.torch_private import private

BATCH_NORMS = private("torch.nn.modules.batchnorm._BatchNorm")
NORMS = private("torch.nn.modules.batchnorm._NormBase")  # with running statistics
DROPOUTS = private("torch.nn.modules.dropout._DropoutNd")
