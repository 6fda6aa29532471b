"""A layer of a profile; forecasts of twelve of them are known by formulas."""

LAYER = {
    "forwardSeconds": 0.01,
    "backwardSeconds": 0.02,
    "heldBytes": 400,
    "weightBytes": 100,
    "activationBytes": 10,
    "outputBytes": 5,
}
