"""Is a run well: who hung or died and on which node, slow ranks, and nodes tried before step 1."""
