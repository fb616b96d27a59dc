"""A custom node folder for ComfyUI that adds no nodes: its models then rotate with torch_rope. README.md says how."""

import torch_rope
from torch_rope.integrations import comfy_kitchen

NODE_CLASS_MAPPINGS = {}  # ComfyUI expects this name

comfy_kitchen.register()
print(f"torch_rope {torch_rope.__version__}: registered as a back end of comfy-kitchen.")
