"""Private base classes of torch's public layers; users derive their own layers from these, too."""

from hoglib._core.torch_api.torch_private import private

BATCH_NORMS = private("torch.nn.modules.batchnorm._BatchNorm")  # normalise by the batch
NORMS = private("torch.nn.modules.batchnorm._NormBase")  # may have running statistics
DROPOUTS = private("torch.nn.modules.dropout._DropoutNd")  # draw random numbers
