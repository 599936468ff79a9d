"""POST /attention and POST /attention/grad, over caches and saved forwards too."""
