"""Several engines behind one front end: routing, migration, engines that come and go."""
