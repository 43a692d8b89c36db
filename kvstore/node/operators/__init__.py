"""What operators ask of a node: lists, pins, removal, checks, moves to other nodes, and what its settings amount to."""
