# Installs what setup.py needs to build a wheel for torch $TORCH. With TORCH_ROPE_CUDA=1 that includes the compiler of the
# CUDA release that this torch was built with. Its packages and those that torch brings share the folder nvidia/cu13.
set -euo pipefail
pip install "torch==$TORCH" "setuptools>=77" pybind11 ninja
if [ "$TORCH_ROPE_CUDA" = 1 ]; then
  pip install "cuda-toolkit[nvcc,cccl]==$(python -c 'import torch; print(torch.version.cuda)').*"
  ln -sfn "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13" "${CUDA_HOME:-/opt/cuda}"
  # The linker looks for libcudart.so in lib64.
  cd "${CUDA_HOME:-/opt/cuda}/lib"
  ln -sf libcudart.so.* libcudart.so
  ln -sfn lib ../lib64
fi
