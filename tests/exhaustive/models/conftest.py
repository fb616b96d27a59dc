from examined import examine_once, examined  # noqa: F401
