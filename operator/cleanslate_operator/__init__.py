"""The operator of Clean Slate: turns GPUNodeReset objects into resets of nodes, and says what became of them."""
