"""Data that is drawn by index."""

import torch


class Images:
    """Images of noise, with more of one colour: their class."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(index))
        image[index % 3] += 1
        return image, torch.tensor(index % 3)
