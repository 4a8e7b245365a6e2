"""An agent as a program, which `zoom_command.py` trains. It reads its task from a file, calls a URL, and imports nothing of vlmrl."""

import base64
import io
import json
import os
import re
from urllib.request import Request, urlopen

from PIL import Image


def main():
    with open(os.environ["VLMRL_TASK"], encoding="utf-8") as file:
        task = json.load(file)
    image = Image.open(task["images"][0])
    messages = [user(image, task["messages"][0]["content"][-1]["text"])]
    response = ask(messages)
    corners = re.findall(r"\d+", response.partition("bbox")[2])[:4]
    if "<answer>" not in response and len(corners) == 4:
        left, top, right, bottom = (min(int(corner), 1000) * image.width // 1000 for corner in corners)
        if left + 8 <= right and top + 8 <= bottom:
            closer = user(image.crop((left, top, right, bottom)), "Closer:")
            print(ask([*messages, {"role": "assistant", "content": response}, closer]))


def ask(messages):
    """The model's response to the messages."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def user(image, text):
    """A message with the image at 32 x 32 pixels, and the text."""
    file = io.BytesIO()
    image.convert("RGB").resize((32, 32), Image.Resampling.BOX).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


if __name__ == "__main__":
    main()
