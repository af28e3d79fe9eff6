"""Which differentiable top-k should I use: one small task after the other, and every method on each.

``TASKS`` names them; each is a class of this package, see ``training``.
"""

TASKS = {
    "indexer-64": "an indexer fetches 4 of 64 tokens; the needle's value is asked for",
    "indexer-256": "the same with 256 tokens",
    "indexer-512": "the same with 512 tokens",
    "patches": "9 of 49 patches of a picture of 84 x 84 pixels, a digit among clutter",
    "pixels-20": "20 pixels for all digits, and a network that sees nothing else",
    "pixels-50": "the same with 50 pixels",
    "instances": "20 pixels for each digit, chosen by a network that sees all",
    "top-5": "a loss for the five best of 100 classes, on frozen features of a ViT",
    "top-5-noisy": "the same, with 40 % of the labels changed inside their superclass",
    "neighbours": "an embedding for a classifier by 9 nearest neighbours",
    "pruning": "a network for digits with 10 % of its weights",
}
