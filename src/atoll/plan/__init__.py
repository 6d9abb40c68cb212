"""What a run will need, in closed form, from its settings alone: no torch, no device."""
