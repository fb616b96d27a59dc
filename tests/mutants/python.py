# (what is wrong, file, exact old text, new text, the test file that catches it)
SIGNATURES, REGISTER, SHARDING = "torch_rope/_signatures.py", "torch_rope/_register.py", "torch_rope/_sharding.py"
FREQUENCIES, MULTIMODAL, MODULE = "torch_rope/frequencies.py", "torch_rope/multimodal.py", "torch_rope/rotary_embedding.py"
PATCH, REFERENCE, FUNCTIONAL = "torch_rope/integrations/transformers.py", "torch_rope/reference.py", "torch_rope/functional.py"
VMAP = FLOPS = "tests/pytorch/test_compile.py"  # wherever vmap's and flops' tests are
PARALLEL, COMPILE = "tests/pytorch/test_parallel.py", "tests/pytorch/test_compile.py"
TRANSFORMERS, ROTARY = "tests/integrations/test_transformers.py", "tests/modules/test_rotary_embedding.py"

MUTANTS = [
    # registration
    ("vmap: positions of each sample are those of the first", REGISTER, "t[0] if shared and t.shape[1] == 1", "t[0] if t.shape[1] == 1", VMAP),
    ("vmap: a table that is not mapped stays small beside one that is", REGISTER, '(("cos", "sin") if name in ("cos", "sin") else (name,))', "(name,)", VMAP),
    ("vmap: what is written in place may be a copy", REGISTER, "return x.dim() == 4 or x.shape[0] == 1", "return True or x.shape[0] == 1", VMAP),
    ("vmap: the loop writes in place to other samples", REGISTER, "given[x].movedim(dims[x], 0).copy_(out)", "given[x].movedim(dims[x], -1).copy_(out.movedim(0, -1)) if dims[x] == 0 else None", VMAP),
    ("vmap: no samples tell no shapes", REGISTER, "range(max(size, 1))", "range(size)", VMAP),
    ("vmap: axial positions are mapped before the axes", REGISTER, 'dims["positions"], first)})', 'dims["positions"], 0)})', "tests/operators/test_autograd.py"),
    ("vmap: an operator in place may write to what is not mapped", REGISTER, "if any(dims[written] is None for written in signature.written):", "if False:", VMAP),
    ("vmap: tables by position count as tables by token", SIGNATURES, 'if name in ("cos", "sin") and dim == 2:', 'if name in ("cos", "sin") and dim == 1:', VMAP),
    ("vmap: gradients of norm weights are summed over samples", REGISTER, 'signature.name.endswith("_backward")', 'signature.name.endswith("table_backward")', "tests/operators/test_norm.py"),
    ("vmap: gradients of tables are summed over samples", REGISTER, 'signature.name.endswith("_backward")', 'signature.name.endswith("qk_backward")', "tests/operators/test_autograd.py"),
    ("flops: gradients of tables cost what a rotation costs", REGISTER, 'rotated = 4 if signature.name', 'rotated = 3 if signature.name', FLOPS),
    ("flops: a norm is free", REGISTER, 'channel = 4 if shapes', 'channel = 0 if shapes', FLOPS),
    ("flops: the norm's backward is its own only", REGISTER, "channel += 7", "channel = 7", FLOPS),
    ("compile: Inductor is not taught storage offsets", REGISTER, "            _teach_inductor_storage_offsets()\n        with mode", "            pass\n        with mode", COMPILE),
    ("DTensor rules come only if DTensor was imported first", REGISTER, "sys.meta_path.insert(0, _AfterImport())", "sys.meta_path.append(_AfterImport())", PARALLEL),
    # sharding
    ("sharding: a norm takes partial sums", SHARDING, '(rotated if "q_norm_weight" not in call else ())', "rotated", PARALLEL),
    ("sharding: a cache with slots is split by batch", SHARDING, ' and "slots" not in specs', "", PARALLEL),
    ("sharding: what is written whole follows silently", SHARDING, "elif a.written:", "elif False:", PARALLEL),
    ("sharding: what a later mesh dimension has cut is cut again", SHARDING, 'cut_up = any(getattr(p, "dim", None) == dim for p in self.placements[m + 1 :])', "cut_up = False", PARALLEL),
    ("sharding: gradients of norm weights are not sums", SHARDING, 'of_weights.append(grad.placements[m] if grad.axis(m) in (None, "sum") else Partial())', "of_weights.append(grad.placements[m])", PARALLEL),
    ("sharding: what is whole counts once on each rank", SHARDING, "            grad.placements[m] = Partial()", "            pass", PARALLEL),
    ("sharding: tables of axial positions keep the dimension of axes", SHARDING, "_of_dim(placement, placement.dim - 1)", "placement", PARALLEL),
    ("sharding: a cache's blocks and block_size are exchanged", SIGNATURES, '("blocks", "block_size", "heads", "head_dim")', '("block_size", "blocks", "heads", "head_dim")', PARALLEL),
    ("sharding: a call without slots is taken for one with them", SHARDING, '_remembered = _names.index("slots") if "slots" in _names else len(_names)', "_remembered = len(_names)", PARALLEL),
    # frequencies
    ("yarn: the ramp is not rounded outwards", FREQUENCIES, "math.floor(low), math.ceil(high)", "math.floor(low), math.floor(high)", "tests/modules/test_frequencies.py"),
    ("yarn: mscale without mscale_all_dim counts", FREQUENCIES, "if mscale and mscale_all_dim else m(1)", "if mscale else m(1)", "tests/modules/test_frequencies.py"),
    ("dynamic: the factor ignores the trained length", FREQUENCIES, "s = factor * length / original_max_position - (factor - 1)", "s = factor * length / original_max_position", "tests/modules/test_frequencies.py"),
    ("longrope: long from the trained length on", FREQUENCIES, "seq_len > original_max_position", "seq_len >= original_max_position", "tests/modules/test_frequencies.py"),
    ("llama3: the two ends are exchanged", FREQUENCIES, "Frequencies(f * s + f / factor * (1 - s), 1.0)", "Frequencies(f / factor * s + f * (1 - s), 1.0)", "tests/modules/test_frequencies.py"),
    ("proportional: the other pairs turn too", FREQUENCIES, "inv_freq[int(partial_rotary_factor * head_dim // 2) :] = 0", "inv_freq[int(partial_rotary_factor * head_dim) :] = 0", "tests/modules/test_frequencies.py"),
    ("from_config: dynamic is scaled from another length", FREQUENCIES, 'trained = longest if trained is None or kind == "dynamic" else trained', "trained = longest if trained is None else trained", "tests/modules/test_frequencies.py"),
    ("from_config: a layer type has no head_dim of its own", FREQUENCIES, 'return {**config, "global_head_dim": None, **own}', "return config", "tests/modules/test_frequencies.py"),
    # multimodal
    ("interleaved M-RoPE: all sections are as long as the first", MULTIMODAL, "if j < 3 * sections[j % 3]", "if j < 3 * sections[0]", "tests/modules/test_multimodal.py"),
    ("Ernie: width before height", MULTIMODAL, "turns = [1, 2] * sections[0]", "turns = [2, 1] * sections[0]", "tests/modules/test_multimodal.py"),
    ("cu_seqlens: the first token of a sequence belongs to the one before", MULTIMODAL, "right=True", "right=False", "tests/modules/test_multimodal.py"),
    # RotaryEmbedding
    ("RotaryEmbedding: the length is the highest position", MODULE, "positions.amax() + (offset + 1)", "positions.amax() + offset", ROTARY),
    ("RotaryEmbedding: a negative position is looked up in the long table", MODULE, "(long & (positions + offset >= 0))", "long", ROTARY),
    ("RotaryEmbedding: .half() casts the frequencies", MODULE, "own = {name: self._buffers.pop(name) for name in self._names if name in self._buffers}", "own = {}", ROTARY),
    ("RotaryEmbedding: dynamic by another power", MODULE, "self._exponent = -2 / (rotary_dim - 2)", "self._exponent = -2 / rotary_dim", ROTARY),
    ("RotaryEmbedding: attention_factor is not passed", MODULE, '{"attention_factor": self.attention_factor, "interleaved"', '{"attention_factor": 1.0, "interleaved"', ROTARY),
    ("RotaryEmbedding: to_empty leaves the buffers empty", MODULE, "(buffer if _mesh(buffer) is None else buffer.to_local()).copy_(made)", "pass", ROTARY),
    # functions
    ("functions: inverse is not passed", FUNCTIONAL, '"interleaved": interleaved, "inverse": inverse}', '"interleaved": interleaved, "inverse": False}', "tests/operators/test_reference.py"),
    ("functions: norm_eps is not passed", FUNCTIONAL, "if norm_eps == 1e-6 and attention_factor == 1.0", "if attention_factor == 1.0", "tests/operators/test_reference.py"),
    ("functions: interleaved alone is not passed", FUNCTIONAL, "if attention_factor == 1.0 and not interleaved and not inverse:", "if attention_factor == 1.0 and not inverse:", "tests/operators/test_reference.py"),
    ("functions: slots are not passed", FUNCTIONAL, "        offset,\n        slots,\n", "        offset,\n        None,\n", "tests/operators/test_reference.py"),
    # reference
    ("reference: inverse is ignored", REFERENCE, "s = -s if inverse else s", "s = s", "tests/operators/test_reference.py"),
    ("reference: negative slots are written", REFERENCE, "written = slots >= 0", "written = slots >= -1", "tests/operators/test_reference.py"),
    ("reference: two roundings in 16 bits", REFERENCE, "a * c - b * s  # rounded here", "(a * c).to(x.dtype) - b * s  # rounded here", "tests/operators/test_reference.py"),
    # patch
    ("patch: DeepSeek's reordering is left out", PATCH, 'reordered = self.pairing == "interleaved in, half-split out"', "reordered = False", TRANSFORMERS),
    ("patch: tables of two angles for a pair are taken", PATCH, "if not any(call.of_parts or _has_form(call.rotation.tables, *tables) for call in calls):", "if False:", TRANSFORMERS),
    ("patch: float16 tables beside another x are refused", PATCH, "            if cos.dtype != torch.float32 and cos.dtype != x.dtype:", "            if False:", TRANSFORMERS),
    ("patch: undo leaves the replica's method", PATCH, "            vars(r.module).pop(_replicate.__name__, None)\n", "", TRANSFORMERS),
    ("patch: k that is None is rotated", PATCH, 'source += f" if {self.tensors[1]} is not None else original({call})"', 'source += ""', TRANSFORMERS),
    ("patch: q, k and tables may differ in length", PATCH, 'for fewer in ({"q_seq": 4}, {"table_seq": 4}):', "for fewer in ():", TRANSFORMERS),
    ("patch: a wrapped function is rebuilt without its decorator", PATCH, "return self._copy(function, function.__globals__, closure, new._torch_rope)", "return new", TRANSFORMERS),
]
