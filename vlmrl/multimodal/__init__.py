"""Images and prompts: loading in `images.py`, one processed copy of each in `store.py`, messages to token ids in `renderer.py`."""
