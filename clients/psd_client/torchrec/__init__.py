"""TorchRec's embedding collections, whose rows are in tables on the shards: the same classes, for ids without a bound.

What torchrec's programs build and call has the names and arguments here that it has there. torchrec itself need not be
installed, and is never imported: configurations and features may be torchrec's or these, told apart by what they are.

    config.py      what a table is; the arguments of psd's embedding for it
    jagged.py      features and outputs
    modules.py     the collections, made of psd_client.torch's embeddings

Must not know shards, pulls or autograd.
"""

from psd_client.torchrec.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from psd_client.torchrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from psd_client.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
]


def __dir__() -> list[str]:
    return __all__
