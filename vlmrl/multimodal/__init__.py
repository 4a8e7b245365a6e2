"""Images and prompts: `images.py` loads, `store.py` processes each distinct image once, `renderer.py` makes token ids of messages."""
