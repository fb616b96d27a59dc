"""Tests that Core ML converts decomposed programs, and that ExecuTorch, OpenVINO and onnxruntime compute with them what the
operators do."""

import copy

import pytest
import torch
from cases import needed
from programs import DIM, HEADS, LENGTH, Everything
from torch.utils._pytree import tree_leaves

import torch_rope
from torch_rope.selfcheck.calls import Source

pytestmark = pytest.mark.cpu


def coreml(program, tensors):
    tools = needed("coremltools")  # its models run on macOS alone
    tools.convert(program, minimum_deployment_target=tools.target.iOS18, skip_model_load=True)


def executorch(program, tensors):
    program = needed("executorch.exir").to_edge(program).to_executorch().buffer
    loaded = needed("executorch.runtime").Runtime.get().load_program(program)
    return [t.clone() for t in loaded.load_method("forward").execute(tensors)]


def openvino(program, tensors):
    ov = needed("openvino")
    model = ov.compile_model(ov.convert_model(program), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return [torch.from_numpy(t.copy()) for t in model([t.numpy() for t in tensors]).to_tuple()]


def onnx(program, tensors):
    program = needed("onnxscript") and torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
    session = needed("onnxruntime").InferenceSession(program.model_proto.SerializeToString())
    names = [i.name for i in session.get_inputs()]
    return map(torch.from_numpy, session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)}))


@pytest.mark.parametrize("source", ["table", "inv_freq"])
@pytest.mark.parametrize("run", [coreml, executorch, openvino, onnx])
@pytest.mark.filterwarnings("ignore")
def test_a_decomposed_program_computes_what_the_operators_do(run, source):
    angles = Source(source, "int64 [B,S]").arguments(2, 5, DIM - 4, torch.float32, "cpu")
    given = torch.randn(2, 5, HEADS, DIM), torch.randperm(4 * LENGTH)[:10].view(2, 5) - 3, angles
    module = Everything(quantised=run is not coreml)
    program = torch.export.export(module, copy.deepcopy(given))
    program = program.run_decompositions({**torch.export.default_decompositions(), **torch_rope.decompositions()})
    found, expected = run(program, tree_leaves(given)), tree_leaves(module(*given))
    if found is not None:
        torch.testing.assert_close(list(found), expected, rtol=1e-5, atol=1e-5)
