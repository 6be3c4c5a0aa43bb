"""Several engines behind one front end: routing, rebalancing, members that come and go."""
