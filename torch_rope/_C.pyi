devices: tuple[str, ...]  # that the build has kernels for

def cpu_instruction_set() -> str: ...
def metal_pipelines() -> list[tuple[str, int, int]]: ...  # only where devices has mps
