"""Batches that workers of a DataLoader have loaded, as JSON: a process of its own, since forks of one that has JAX may hang."""

from __future__ import annotations

import itertools
import json

from torch.utils.data import DataLoader, Dataset

from diloco.errors import SettingsError
from diloco.integrations.torch_data import RunDataset, batches_of


class Numbers(Dataset[int]):  # type: ignore[misc]
    """The numbers from 0 to 9."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    """Print the first six batches of share 2 of 3 by workers, and what a worker says that iterates a run's batches."""
    batches = batches_of(Numbers(), 2, num_workers=2)(2, 3, 0, 0)
    found = [batch.tolist() for batch in itertools.islice(batches, 6)]
    refused = ""
    try:
        next(iter(DataLoader(RunDataset(None, batches_of(Numbers(), 2)), batch_size=None, num_workers=1)))
    except SettingsError as error:
        refused = str(error)
    print(json.dumps({"batches": found, "refused": refused}))


if __name__ == "__main__":
    main()
