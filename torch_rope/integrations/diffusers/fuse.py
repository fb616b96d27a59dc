def fuser(rounding: str):
    return lambda module, owner, name, function, new: (new, "")
