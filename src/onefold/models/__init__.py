"""Small models for the examples, the benchmarks and the tests; plain `torch.nn.Module`s."""

from onefold.models.dense_cnn import DenseCNN
from onefold.models.lenet import LeNet
from onefold.models.lstm import LSTMClassifier
from onefold.models.resnet import ResNet, resnet18
from onefold.models.transformer import TransformerClassifier

__all__ = ["DenseCNN", "LSTMClassifier", "LeNet", "ResNet", "TransformerClassifier", "resnet18"]
