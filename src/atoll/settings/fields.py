"""The kinds of values that settings are made of."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VariableText = Annotated[str, Field(coerce_numbers_to_str=True)]
# One file may be written without its brackets: data.files=a.txt
FileNames = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
