"""The kinds of values that settings are made of."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
# of a scheduler's job names, and of folders that other programs make
WORD_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Word = Annotated[str, Field(pattern=WORD_PATTERN, max_length=120)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VariableText = Annotated[str, Field(coerce_numbers_to_str=True)]
# One file may be written without its brackets: data.files=a.txt; one logger too: loggers=wandb
one_is_a_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
none_is_zero = BeforeValidator(lambda value: 0 if value is None else value)
FileNames = Annotated[list[Annotated[str, Field(min_length=1)]], one_is_a_list]
OverrideNames = Annotated[list[Literal["fit"]], one_is_a_list]
LoggerNames = Annotated[list[Literal["tensorboard", "wandb", "mlflow"]], one_is_a_list]


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
