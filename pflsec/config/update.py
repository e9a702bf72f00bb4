"""The description of an update from elsewhere: whose network it is, and what the client did."""

from typing import Annotated

from pydantic import Field, model_validator

from pflsec.core.config import Config, at_least, option
from pflsec.core.inputs import InputSpec

Side = Annotated[int, Field(ge=1)]


class UpdateConfig(Config):
    """What two files of weights do not tell, by the names of the options of `pflsec attack --before`."""

    shape: tuple[Side, Side, Side] = Field(description="channels, height and width of an image")
    classes: int = Field(ge=2, description="number of classes")
    lr: float = Field(gt=0, description="learning rate of the client's plain SGD")
    mean: tuple[float, ...] = option(
        default=(0.0,), about="of the inputs' normalisation: one for all channels, or one each"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] = option(
        default=(1.0,), about="of the inputs' normalisation, likewise"
    )
    images: int = at_least(1, default=1, about="number of images behind the update")
    steps: int = at_least(1, default=1, about="number of the client's local steps")
    batch_size: int | None = at_least(1, default=None, about="images in a step; none: all")
    split: str | None = option(default=None, about="layer with which the head begins; none: the last")
    known_labels: tuple[Annotated[int, Field(ge=0)], ...] | None = option(
        default=None, about="the images' labels, where the adversary is granted them"
    )

    @property
    def input(self) -> InputSpec:
        """What the network's inputs look like."""
        mean, std = (v * (self.shape[0] if len(v) == 1 else 1) for v in (self.mean, self.std))
        return InputSpec(self.shape, self.classes, mean, std)

    @property
    def per_step(self) -> int:
        """Images in a step."""
        return min(self.batch_size or self.images, self.images)

    @property
    def epochs(self) -> int:
        """How often the client went through its images."""
        return self.steps // -(-self.images // self.per_step)

    @model_validator(mode="after")
    def _fit_together(self) -> "UpdateConfig":
        for name in ("mean", "std"):
            if len(values := getattr(self, name)) not in (1, self.shape[0]):
                raise ValueError(f"{name} has {len(values)} values for {self.shape[0]} channels")
        each = -(-self.images // self.per_step)
        if self.steps % each:
            raise ValueError(
                f"{self.images} images in batches of {self.per_step} are {each} steps an epoch; {self.steps} steps are no "
                "whole number of epochs"
            )
        if (labels := self.known_labels) is not None:
            if len(labels) != self.images:
                raise ValueError(f"known_labels has {len(labels)} labels for {self.images} images")
            if max(labels) >= self.classes:
                raise ValueError(
                    f"known_labels has {max(labels)}; with {self.classes} classes, labels end at {self.classes - 1}"
                )
        return self
