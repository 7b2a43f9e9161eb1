"""Batches of which each rank loads what the plan gives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from autopar.arguments import LocalInput
from autopar.ir.errors import InputError
from autopar.materialise import as_global, box_of
from autopar.module import ParallelModule
from autopar.runtime.groups import RankContext


class DistributedBatches:
    """An iterable over the batches of a data set, divided as a module's inputs are.

    dataset:
        map-style: ``dataset[i]`` and ``len(dataset)``, the same on every rank
    batch_size:
        of the whole batch, over all ranks
    parallel:
        the module that is called with the batches. A batch is a dict of its keyword arguments, a
        tuple of its positional ones, or its one tensor.
    shuffle, seed:
        a new order in every epoch, from ``seed + epoch``
    drop_last:
        leave out a smaller last batch; it is given otherwise, and the module takes it
    options:
        of `torch.utils.data.DataLoader`: ``num_workers``, ``collate_fn``, ``pin_memory`` …

    Each rank loads the rows that ``plan.input_layouts`` gives it; ranks that hold copies load the
    same. (Where inputs are divided differently it loads all rows and cuts.) A module with
    ``inputs="local"`` gets its pieces as they are, and DTensors for a batch of another size than
    the example's; one with ``inputs="global"`` gets DTensors. On one rank, and before the module
    is compiled, batches are whole.

    Which rows a batch has does not depend on the plan or the number of ranks. `state_dict` says
    how far the epoch is, and `load_state_dict` lets the next iteration go on from there, under
    another plan or number of ranks as well.

    Raises InputError for a data set without length, or a batch size below 1.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        parallel: ParallelModule | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise InputError(
                f"dataset: expected one with a length and numbered items, got a "
                f"{type(dataset).__name__}"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size: expected a number of rows, got {batch_size!r}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._parallel = parallel
        self._options = options
        #: How many batches of this epoch were given out, and where the next iteration begins.
        self._done = 0
        self._begin = 0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        cut = _Cut.of(self._parallel)
        begin, self._begin = self._begin, 0
        self._done = begin
        whole = self._batches()[begin:]
        mine = [rows if cut is None else cut.rows(rows) for rows in whole]
        # Copies of rows get the same numbers for their augmentation, other rows other ones. The
        # caller's own generator stays where it is.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        loader = DataLoader(self.dataset, batch_sampler=mine, generator=generator, **self._options)
        for rows, batch in zip(whole, loader, strict=True):
            self._done += 1
            yield batch if cut is None else cut.batch(batch, len(rows))
        self.epoch += 1
        self._done = 0

    def _batches(self) -> list[list[int]]:
        """The rows of every whole batch of this epoch."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self.dataset), generator=generator).tolist()
        else:
            order = list(range(len(self.dataset)))
        size = self.batch_size
        return [order[i * size : (i + 1) * size] for i in range(len(self))]

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands; the same on every rank, plain numbers."""
        return {
            "epoch": self.epoch,
            "batches": self._done,
            "seed": self.seed,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration go on after the batches that were given out already.

        Raises InputError where the batches were of another size.
        """
        if state["batch_size"] != self.batch_size:
            raise InputError(
                f"batch_size: {self.batch_size} here, {state['batch_size']} in the saved state; "
                "the rows that were seen could not be told"
            )
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._begin = self._done = state["batches"]


class _Cut:
    """How one rank's batches are cut."""

    def __init__(
        self,
        context: RankContext,
        inputs: Mapping[str, LocalInput],
        names: list[str],
        local: bool,
    ) -> None:
        self._context = context
        self._inputs = inputs
        self._names = names
        self._local = local
        batched = [known for known in inputs.values() if known.whole]
        sizes = Counter(known.whole[0] for known in batched)
        #: The rows of the example, by which inputs that have a batch are told from others.
        self._batch = sizes.most_common(1)[0][0] if sizes else 0
        batched = [known for known in batched if known.whole[0] == self._batch]
        alike = len({known.layout.dims[0] for known in batched}) == 1
        #: The input whose rows are loaded; None where inputs are divided differently.
        self._rows_of = batched[0] if alike else None

    @staticmethod
    def of(parallel: ParallelModule | None) -> _Cut | None:
        if parallel is None or not parallel.built or parallel.context.device_mesh is None:
            return None
        names = list(parallel.call_signature.parameters)
        return _Cut(parallel.context, parallel.example_inputs, names, parallel.takes_pieces)

    def rows(self, rows: list[int]) -> list[int]:
        """Those of a batch that this rank loads."""
        if self._rows_of is None:
            return rows
        shape = (len(rows), *self._rows_of.whole[1:])
        (start, *_), (size, *_) = box_of(self._rows_of.layout, shape, self._context)
        # A rank whose share of a small batch is empty still needs a row to know its shape.
        return rows[start : start + size] or rows[:1]

    def batch(self, batch: Any, count: int) -> Any:
        """The pieces of a batch of `count` rows, from the rows that were loaded."""
        if isinstance(batch, Mapping):
            return {key: self._value(str(key), value, count) for key, value in batch.items()}
        if isinstance(batch, (tuple, list)):
            named = zip(self._names, batch, strict=False)
            return tuple(self._value(name, value, count) for name, value in named)
        return self._value(self._names[0], batch, count)

    def _value(self, name: str, value: Any, count: int) -> Any:
        def cut(keys: Any, leaf: Any) -> Any:
            known = self._inputs.get(name + pytree.keystr(keys))
            if not isinstance(leaf, Tensor) or known is None or leaf.dim() != len(known.whole):
                return leaf
            return self._piece(leaf, known, count)

        return pytree.tree_map_with_path(cut, value)

    def _piece(self, loaded: Tensor, known: LocalInput, count: int) -> Tensor:
        own_rows = self._rows_of is not None and known.whole[:1] == (self._batch,)
        shape = (count, *loaded.shape[1:]) if own_rows else tuple(loaded.shape)
        starts, sizes = box_of(known.layout, shape, self._context)
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            # Of the first dimension only these rows were loaded.
            loaded = loaded.narrow(dim, 0 if own_rows and dim == 0 else start, size)
        if self._local and shape == known.whole:
            return loaded
        if not self._local and not known.layout.split_axes:
            return loaded
        return as_global(loaded.contiguous(), known.layout, shape, self._context)
