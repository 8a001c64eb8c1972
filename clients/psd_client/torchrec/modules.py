"""The collections: for a batch of features, the rows of all tables, pooled or not.

The features of one table are looked up as one, and all tables in one round trip. Must not know how rows come and how their
gradients leave (psd_client.torch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psd_client.torch.embedding import Embedding, EmbeddingBag
from psd_client.torch.embedding import EmbeddingCollection as Lookups
from psd_client.torch.uncompiled import uncompiled
from psd_client.torchrec.config import arguments_of, check_tables, mode_of, names_of_outputs
from psd_client.torchrec.jagged import Features, JaggedTensor, KeyedTensor, begins_of, like
from psd_core.optimizer import Optimizer


class EmbeddingBagCollection(torch.nn.Module):
    """Pooled rows of several features, as torchrec.EmbeddingBagCollection, from tables on the shards that grow by id.

        user = EmbeddingBagConfig(name="t_user", embedding_dim=16, num_embeddings=1_000_000, feature_names=["user"])
        item = EmbeddingBagConfig(name="t_item", embedding_dim=16, num_embeddings=1_000_000, feature_names=["item", "seen"])
        options = {"t_item": {"admit_after": 3, "expire_steps": 10_000}}
        collection = EmbeddingBagCollection([user, item], optimizer=psd_client.Adagrad(lr=0.05), options=options)
        pooled = collection(features)["seen"]  # (samples, 16)

    `psd_client.torch.distribute` with the model that holds it declares the tables. Ids are all of int64. What is said of
    psd_client.torch.EmbeddingBag holds here: gradients, evaluation, state_dict.

    Args:
        tables: an EmbeddingBagConfig for each, torchrec's or psd_client.torchrec's. `num_embeddings` is no limit.
        is_weighted: True if features have weights, by which rows are multiplied before they are summed.
        device: device of the output.
        optimizer: the rule of the rows of all tables, such as psd_client.Adagrad(lr=0.05). None: that of the optimizer given to
            `distribute`.
        options: by name of a table, what differs for it: optimizer, init, seed, dtype, updates, admit_after,
            admit_probability, expire_steps, expire_seconds, max_rows, at_limit, as in psd_client.Table.

    Attributes:
        embedding_bags: the psd_client.torch.EmbeddingBag of each table, by name.

    Raises:
        InvalidRequest: a configuration or an option is wrong; the message names it.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: Any = None,
        *,
        optimizer: Optimizer | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        options = options or {}
        check_tables(tables, options)
        self._configs = list(tables)
        self._is_weighted = is_weighted
        others = {"device": device, "optimizer": optimizer, "include_last_offset": True}
        self.embedding_bags = Lookups(
            {
                config.name: EmbeddingBag(
                    config.name,
                    config.embedding_dim,
                    mode=mode_of(config, is_weighted=is_weighted),
                    **arguments_of(config, options.get(config.name, {}), others),
                )
                for config in self._configs
            }
        )
        self._names = [name for names in names_of_outputs(self._configs) for name in names]
        self._dims = [config.embedding_dim for config in self._configs for _ in config.feature_names]

    @uncompiled
    def forward(self, features: Any) -> Any:
        """The pooled rows: a KeyedTensor of float32, (samples, sum of the dims), torchrec's if the features are torchrec's.

        Its keys are the features of the first table, then those of the second, and so on; `feature@table` for a feature that
        several tables have.

        Args:
            features: a KeyedJaggedTensor of int64 or int32, torchrec's or psd_client.torchrec's. It may have other keys, too.

        Raises:
            InvalidRequest: a feature is missing. InvalidTensor, TypeError: they are no such features.
            NotDeclared: `distribute` has not been called.
            PsdError: what the shards or the connection refuse.
        """
        given = Features(features, is_weighted=self._is_weighted)
        pooled = self.embedding_bags(
            {
                config.name: (
                    given.ids(config.feature_names),
                    begins_of(given.lengths(config.feature_names).flatten()),
                    given.weights(config.feature_names),
                )
                for config in self._configs
            }
        )
        rows = [
            of_feature
            for config in self._configs
            for of_feature in pooled[config.name].view(len(config.feature_names), given.stride, config.embedding_dim)
        ]
        return like(features, KeyedTensor)(self._names, self._dims, torch.cat(rows, dim=1))

    @uncompiled
    def prefetch(self, features: Any) -> None:
        """Fetch the rows of the next step's features in the background; see psd_client.torch.Embedding.prefetch."""
        given = Features(features)
        self.embedding_bags.prefetch({config.name: given.ids(config.feature_names) for config in self._configs})

    def embedding_bag_configs(self) -> list[Any]:
        """The configurations of the tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """True if features have weights."""
        return self._is_weighted


class EmbeddingCollection(torch.nn.Module):
    """Rows of several features, one for each id, as torchrec.EmbeddingCollection, from tables on the shards that grow by id.

    Args:
        tables: an EmbeddingConfig for each, torchrec's or psd_client.torchrec's.
        need_indices: True if the outputs' weights are to be the ids.
        device, optimizer, options: as in EmbeddingBagCollection.

    Attributes:
        embeddings: the psd_client.torch.Embedding of each table, by name.

    Raises:
        InvalidRequest, TypeError: as EmbeddingBagCollection.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        device: Any = None,
        need_indices: bool = False,
        *,
        optimizer: Optimizer | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        options = options or {}
        check_tables(tables, options)
        self._configs = list(tables)
        self._need_indices = need_indices
        others = {"device": device, "optimizer": optimizer}
        self.embeddings = Lookups(
            {
                config.name: Embedding(
                    config.name, config.embedding_dim, **arguments_of(config, options.get(config.name, {}), others)
                )
                for config in self._configs
            }
        )
        self._names = names_of_outputs(self._configs)

    @uncompiled
    def forward(self, features: Any) -> dict[str, Any]:
        """The rows by name of the feature: JaggedTensors of float32, (ids of the feature, dim).

        Names, arguments and errors are as in EmbeddingBagCollection.
        """
        given = Features(features)
        found = self.embeddings({config.name: given.ids(config.feature_names) for config in self._configs})
        make = like(features, JaggedTensor)
        outputs = {}
        for config, names in zip(self._configs, self._names, strict=True):
            lengths = given.lengths(config.feature_names)
            counts = lengths.sum(dim=1).tolist()
            rows, ids = torch.split(found[config.name], counts), torch.split(given.ids(config.feature_names), counts)
            for name, of_name, its_ids, its_lengths in zip(names, rows, ids, lengths, strict=True):
                weights = its_ids.to(of_name.device) if self._need_indices else None
                outputs[name] = make(of_name, weights, its_lengths.to(of_name.device))
        return outputs

    @uncompiled
    def prefetch(self, features: Any) -> None:
        """Fetch the rows of the next step's features in the background; see psd_client.torch.Embedding.prefetch."""
        given = Features(features)
        self.embeddings.prefetch({config.name: given.ids(config.feature_names) for config in self._configs})

    def embedding_configs(self) -> list[Any]:
        """The configurations of the tables."""
        return self._configs

    def need_indices(self) -> bool:
        """True if the outputs' weights are the ids."""
        return self._need_indices
