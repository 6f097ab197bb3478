"""Episodes of several turns: tools, interactions, environments, and the loops that play them."""
