"""GANs in the plane and of MNIST digits, with gradient penalties."""

from experiments.gan.experiment import GAN
from experiments.gan.image_gan import ImageGAN

__all__ = ["GAN", "ImageGAN"]
