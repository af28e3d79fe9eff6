"""Which differentiable top-k should I use: one small task after the other, and every method on each.

``TASKS`` names them; each is a class of this package, see ``training``.
"""

TASKS = {
    "indexer-64": "an indexer fetches 4 of 64 tokens; the needle's value is asked for",
    "indexer-256": "the same with 256 tokens",
    "pixels-20": "20 pixels for all digits, and a network that sees nothing else",
    "pixels-50": "the same with 50 pixels",
    "instances": "20 pixels for each digit, chosen by a network that sees all",
    "neighbours": "an embedding for a classifier by 9 nearest neighbours",
    "pruning": "a network for digits with 10 % of its weights",
}
