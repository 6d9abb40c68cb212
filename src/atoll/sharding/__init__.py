"""How one model is spread over ranks: layouts (model, mesh) -> model, and engines (one step)."""
