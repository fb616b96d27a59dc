"""Tiny random models of diffusers, with inputs, for each class of transformer that rotates queries and keys.

MODELS gives for a class name, which a variant can follow, a function that returns (model, inputs). The results depend
on the rotation: no gate is zero, and the weights of queries and keys are large.
"""

import functools
import inspect
import re
from types import SimpleNamespace

import torch
from cases import missing, needed

diffusers = needed("diffusers")
if not hasattr(diffusers, "Ideogram4Transformer2DModel"):
    missing("diffusers 0.42")

from diffusers.models import embeddings  # noqa: E402
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache  # noqa: E402

# The models that cannot run in bfloat16, and why.
FLOAT32_ONLY = {
    "Kandinsky5Transformer3DModel": "time_embeddings compute in float32, on the CPU with weights in bfloat16",
    "SanaWMTransformer3DModel, camera": "the grid of the camera has no bfloat16 on the CPU",
}

# The models that have no gradient on the CPU, and why. Their parameters need none.
FORWARD_ONLY = dict.fromkeys(
    ["AnyFlowFARTransformer3DModel", "Kandinsky6SRTransformer3DModel"], "flex_attention has no backward on the CPU"
)

# Inputs that the pipelines leave in float32 when the model has another dtype.
TABLES = {"image_rotary_emb", "rotary_embedding", "video_rotary_emb", "position_ids"}
# The inputs that no gradient is compared of: the camera's is the difference of large numbers.
NO_GRADIENT = {*TABLES, "img_ids", "txt_ids", "image_cond_ids", "camera_conditions"}


def r(*shape):
    return torch.randn(shape)


def grid(*sizes):
    """Returns the coordinates of all points of a grid, one point a row."""
    return torch.cartesian_prod(*(torch.arange(float(size)) for size in sizes))


def ones(*shape):
    return torch.ones(shape, dtype=torch.bool)


# Timesteps that bfloat16 has exactly, also when a model multiplies them by 1000.
TIMES = dict(timestep=torch.tensor([0.25, 0.5]))
STEPS = dict(timestep=torch.tensor([250.0, 500.0]))
GUIDANCE = dict(guidance=torch.tensor([1000.0, 4000.0]))


def tokens(axes=3, **more):
    """Returns the inputs of a model of the kind of Flux: an image of 3 x 4 tokens and 5 tokens of text."""
    img_ids, txt_ids = torch.zeros(12, axes), torch.zeros(5, axes)
    img_ids[:, 1:3] = grid(3, 4)
    if axes > 3:
        txt_ids[:, 3] = torch.arange(5)
    ids = dict(img_ids=img_ids, txt_ids=txt_ids)
    return dict(hidden_states=r(2, 12, 4), encoder_hidden_states=r(2, 5, 16)) | ids | TIMES | more


def video(channels=4, size=(2, 6, 8), times=STEPS, **more):
    """Returns the inputs of a model that takes [batch, channels, frames, height, width], and 5 tokens of text."""
    return dict(hidden_states=r(2, channels, *size), encoder_hidden_states=r(2, 5, 16)) | times | more


def image(channels=4, size=(6, 8), **more):
    return video(channels, size, **more)


def config_of(name):
    """Returns the arguments that a model of TABLE is made with."""
    arguments = inspect.signature(getattr(diffusers, name.partition(",")[0]).__init__).parameters
    return {n: value for n, value in DEFAULTS.items() if n in arguments} | TABLE[name][0]


def tables(pipeline, *batch, **config):
    """Returns the tables that a pipeline makes for 2 latent frames of 6 x 8."""
    transformer = SimpleNamespace(config=SimpleNamespace(**config))
    self = SimpleNamespace(vae_scale_factor_spatial=8, transformer=transformer)
    return pipeline._prepare_rotary_positional_embeddings(self, *batch, 48, 64, 2, "cpu")


def cogvideox(frames=2, patch_size_t=None, **more):
    rotary = tables(diffusers.CogVideoXPipeline, **config_of("CogVideoXTransformer3DModel"), patch_size_t=patch_size_t)
    return video(4, (frames, 6, 8), image_rotary_emb=rotary, **more) | dict(hidden_states=r(2, frames, 4, 6, 8))


def omnigen():
    length = 5 + 1 + 12  # the text, the timestep and the image
    return dict(hidden_states=r(2, 4, 6, 8), **TIMES, input_ids=torch.randint(10, (2, 5)), input_img_latents=[],
                input_image_sizes={}, attention_mask=torch.ones(2, length, length),
                position_ids=torch.arange(length).repeat(2, 1))  # fmt: skip


def ltx2():
    return dict(hidden_states=r(2, 24, 4), audio_hidden_states=r(2, 9, 4), encoder_hidden_states=r(2, 5, 16),
                audio_encoder_hidden_states=r(2, 5, 16), **STEPS, num_frames=2, height=3,
                width=4, audio_num_frames=9, fps=25.0)  # fmt: skip


def qwen_image():
    return dict(hidden_states=r(2, 12, 16), encoder_hidden_states=r(2, 5, 16), **TIMES, img_shapes=[(1, 3, 4)] * 2,
                encoder_hidden_states_mask=ones(2, 5))  # fmt: skip


def anyflow(**more):
    return dict(hidden_states=r(2, 2, 4, 8, 8), encoder_hidden_states=r(2, 5, 16), timestep=torch.full((2, 2), 500.0),
                r_timestep=torch.full((2, 2), 250.0), **more)  # fmt: skip


def minimax_h3():
    """Returns 5 tokens of text, 4 of audio and 8 of video in one sequence."""
    kinds = torch.tensor([1] * 5 + [2] * 4 + [0] * 8)
    position_ids = torch.zeros(17, 3)
    position_ids[:, 0] = torch.arange(17)
    position_ids[9:, 1:] = grid(2, 4)
    return dict(hidden_states=r(2, 8, 16), audio_hidden_states=r(2, 4, 4), encoder_hidden_states=r(2, 5, 16), **TIMES,
                timestep_indices=(kinds == 2).long(), token_tags=kinds, position_ids=position_ids,
                text_indices=torch.arange(5), audio_indices=torch.arange(5, 9),
                video_indices=torch.arange(9, 17))  # fmt: skip


def sana_wm(**more):
    times = torch.tensor([[[0.0, 250.0]], [[0.0, 500.0]]])  # of each frame
    masks = dict(encoder_attention_mask=ones(2, 5))
    return video(size=(2, 3, 4), timestep=times, chunk_plucker=r(2, 6, 2, 3, 4), **masks, **more)


def camera():
    """Returns for each frame the matrix of the camera, its focal lengths and its center."""
    return torch.cat([torch.eye(4).flatten(), torch.tensor([4.0, 4.0, 2.0, 1.5])]).repeat(2, 2, 1)


def stable_audio3():
    return video(size=(12,), times=TIMES, global_hidden_states=r(2, 8), local_add_cond=r(2, 3, 12))


def refiner(rope_type):
    config = config_of("SanaWMLTX2RefinerTransformer3DModel") | dict(rope_type=rope_type)
    model = diffusers.SanaWMLTX2RefinerTransformer3DModel(**config)
    tables = model.build_rotary_emb_for_absolute_positions(2, [0, 2], 3, 4, "cpu", 24.0)
    return dict(hidden_states=r(2, 24, 4), encoder_hidden_states=r(2, 5, 16), timestep=torch.tensor([[250.0], [500.0]]),
                video_rotary_emb=tables)  # fmt: skip


def ideogram4():
    """Returns 5 tokens of text and 12 of an image in one sequence."""
    is_image = torch.arange(17) >= 5
    position_ids = torch.arange(17)[:, None].repeat(1, 3)
    position_ids[5:] = grid(1, 3, 4) + 65536
    return dict(hidden_states=r(2, 17, 4) * is_image[:, None], encoder_hidden_states=r(2, 17, 16) * ~is_image[:, None],
                **TIMES, position_ids=position_ids.repeat(2, 1, 1), segment_ids=torch.ones(2, 17, dtype=torch.long),
                indicator=torch.where(is_image, 2, 3).repeat(2, 1))  # fmt: skip


# fmt: off
# The arguments of all classes that have arguments of these names.
DEFAULTS = dict(in_channels=4, out_channels=4, num_layers=2, num_single_layers=1, num_attention_heads=2,
    attention_head_dim=32, text_dim=16, text_embed_dim=16, hidden_size=64, axes_dims_rope=(8, 12, 12), ffn_dim=32,
    joint_attention_dim=16, freq_dim=32, caption_channels=16, time_embed_dim=8, cross_attention_dim=64,
    num_refiner_layers=1, rope_axes_dim=(8, 12, 12), sample_width=8, sample_height=6, num_key_value_heads=1,
    intermediate_size=32, axes_dims=(8, 12, 12), audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
    audio_attention_head_dim=16, audio_cross_attention_dim=32, num_heads=2, dim=64, cap_feat_dim=16, sample_frames=8,
    max_text_seq_length=5, use_rotary_positional_embeddings=True, in_visual_dim=4, time_dim=8, out_visual_dim=4,
    model_dim=64, ff_dim=32, num_visual_blocks=2, num_text_blocks=1, depth=2, n_refiner_layers=1, n_heads=2,
    axes_lens=(64, 32, 32), image_embed_dim=8, text_len=5, num_kv_heads=1, multiple_of=2, in_text_dim=16,
    in_text_dim2=8, head_dim=32, mlp_width_ratio=1.0, rope_dim_list=(8, 12, 12), ff_mult=1, context_in_dim=16,
    softmax_every_n=2, linear_head_dim=32, chunk_plucker_channels=6, chunk_plucker_post_attn_blocks=2, io_channels=4,
    embed_dim=64, cond_token_dim=16, global_cond_dim=8, local_add_cond_dim=3, timestep_features_dim=8,
    num_memory_tokens=2, vocab_size=16, num_hidden_layers=2, mlp_ratio=2.0, pooled_projection_dim=8)
# name: (what else is passed, inputs)
TABLE = {
    "FluxTransformer2DModel": ({}, lambda: tokens(pooled_projections=r(2, 8))),
    "Flux2Transformer2DModel": (dict(axes_dims_rope=(8, 8, 8, 8), timestep_guidance_channels=32), lambda: tokens(4,
        guidance=torch.tensor([1.0, 4.0]))),
    "ChromaTransformer2DModel": (dict(approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1),
        tokens),
    "BriaTransformer2DModel": ({}, tokens),
    "BriaFiboTransformer2DModel": (dict(text_encoder_dim=8), lambda: tokens(text_encoder_layers=[r(2, 5, 8)] * 3)),
    "BriaFibo2Transformer2DModel": (dict(n_layers=2, injection_layer_ids=(1,), perceiver_num_layers=1,
        min_num_gist_tokens=4, max_num_gist_tokens=8, gist_step=2, gist_min_text_len=4, gist_max_text_len=8,
        axes_lens=(32, 16, 16)), lambda: image(times=TIMES) | dict(encoder_hidden_states=r(2, 2, 5, 16))),
    "WanTransformer3DModel": ({}, video),
    "WanTransformer3DModel, i2v": (dict(image_dim=8, added_kv_proj_dim=64),
        lambda: video(encoder_hidden_states=r(2, 512, 16), encoder_hidden_states_image=r(2, 7, 8))),
    "WanVACETransformer3DModel": (dict(vace_layers=[0], vace_in_channels=6),
        lambda: video(control_hidden_states=r(2, 6, 2, 6, 8))),
    "SkyReelsV2Transformer3DModel": ({}, video),
    "QwenImageTransformer2DModel": (dict(in_channels=16), qwen_image),
    "ZImageTransformer2DModel": (dict(n_layers=1, n_kv_heads=2), lambda: dict(x=[r(4, 1, 6, 8), r(4, 1, 8, 8)],
        cap_feats=[r(5, 16), r(7, 16)], t=torch.tensor([0.25, 0.5]))),
    "LTXVideoTransformer3DModel": ({}, lambda: dict(hidden_states=r(2, 24, 4), encoder_hidden_states=r(2, 5, 16),
        **STEPS, num_frames=2, height=3, width=4, encoder_attention_mask=ones(2, 5))),
    "LTX2VideoTransformer3DModel": ({}, ltx2),
    "LTX2VideoTransformer3DModel, split": (dict(rope_type="split"), ltx2),
    "HunyuanVideoTransformer3DModel": ({}, lambda: video(encoder_attention_mask=ones(2, 5), pooled_projections=r(2, 8),
        **GUIDANCE)),
    "HunyuanVideoFramepackTransformer3DModel": (dict(has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True),
        lambda: video(size=(3, 4, 4), encoder_attention_mask=ones(2, 5), pooled_projections=r(2, 8),
        image_embeds=r(2, 3, 8), **GUIDANCE, indices_latents=torch.arange(7, 10), latents_clean=r(2, 4, 2, 4, 4),
        indices_latents_clean=torch.tensor([0, 6]), latents_history_2x=r(2, 4, 2, 4, 4),
        indices_latents_history_2x=torch.arange(4, 6), latents_history_4x=r(2, 4, 4, 4, 4),
        indices_latents_history_4x=torch.arange(4))),
    "HunyuanVideo15Transformer3DModel": (dict(text_embed_2_dim=8, target_size=16), lambda: video(size=(2, 3, 4),
        encoder_attention_mask=ones(2, 5), encoder_hidden_states_2=r(2, 4, 8), encoder_attention_mask_2=ones(2, 4),
        image_embeds=r(2, 3, 8))),
    "HunyuanImageTransformer2DModel": (dict(rope_axes_dim=(16, 16)), lambda: image(size=(3, 4),
        encoder_attention_mask=ones(2, 5))),
    "HunyuanDiT2DModel": (dict(sample_size=8, patch_size=2, cross_attention_dim=16, cross_attention_dim_t5=8,
        text_len_t5=4), lambda: image(text_embedding_mask=ones(2, 5), encoder_hidden_states_t5=r(2, 4, 8),
        text_embedding_mask_t5=ones(2, 4), image_meta_size=torch.tensor([[64.0, 48.0, 64.0, 48.0, 0.0, 0.0]] * 2),
        style=torch.tensor([0, 0]), image_rotary_emb=embeddings.get_2d_rotary_pos_embed(32, ((0, 0), (3, 4)), (3, 4),
        output_type="pt"))),
    "CogVideoXTransformer3DModel": (dict(patch_size=2), cogvideox),
    "CogVideoXTransformer3DModel, 1.5": (dict(patch_size=2, patch_size_t=2, patch_bias=False),
        lambda: cogvideox(patch_size_t=2)),
    "CogView4Transformer2DModel": (dict(condition_dim=4, rope_axes_dim=(16, 16)),
        lambda: image(original_size=torch.tensor([[48.0, 64.0]] * 2), target_size=torch.tensor([[48.0, 64.0]] * 2),
        crop_coords=torch.zeros(2, 2))),
    "Lumina2Transformer2DModel": (dict(axes_dim_rope=(8, 12, 12), axes_lens=(32, 16, 16)), lambda: image(times=TIMES,
        encoder_attention_mask=ones(2, 5))),
    "LuminaNextDiT2DModel": (dict(sample_size=8, cross_attention_dim=16), lambda: image(times=TIMES,
        encoder_mask=ones(2, 5), cross_attention_kwargs={},
        image_rotary_emb=embeddings.get_2d_rotary_pos_embed_lumina(32, 384, 384))),
    "MochiTransformer3DModel": (dict(pooled_projection_dim=16, max_sequence_length=5),
        lambda: video(encoder_attention_mask=ones(2, 5))),
    "CosmosTransformer3DModel": (dict(adaln_lora_dim=4, max_size=(4, 16, 16), extra_pos_embed_type=None,
        concat_padding_mask=False), lambda: video(fps=24)),
    "OmniGenTransformer2DModel": (dict(pad_token_id=0, vocab_size=10, time_step_dim=8, pos_embed_max_size=16,
        rope_scaling={"long_factor": [1.5] * 16, "short_factor": [1.25] * 16}), omnigen),
    "AllegroTransformer3DModel": (dict(attention_head_dim=48, cross_attention_dim=96, sample_frames=2, patch_size=2,
        interpolation_scale_h=2.0, interpolation_scale_w=2.0, interpolation_scale_t=2.2),
        lambda: video(image_rotary_emb=tables(diffusers.AllegroPipeline, 2, **config_of("AllegroTransformer3DModel")))),
    "StableAudioDiTModel": (dict(sample_size=16, num_key_value_attention_heads=1, cross_attention_dim=32,
        time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=16), lambda: video(size=(15,),
        times=TIMES, global_hidden_states=r(2, 1, 8), rotary_embedding=embeddings.get_1d_rotary_pos_embed(16, 16,
        use_real=True, repeat_interleave_real=False))),
    "HiDreamImageTransformer2DModel": (dict(patch_size=2, caption_channels=[16, 8], text_emb_dim=8,
        num_routed_experts=2, num_activated_experts=2, max_resolution=(8, 8), llama_layers=(0, 1),
        force_inference_output=True), lambda: dict(hidden_states=r(2, 4, 8, 8), timesteps=STEPS["timestep"],
        encoder_hidden_states_t5=r(2, 5, 16), encoder_hidden_states_llama3=r(2, 2, 5, 8), pooled_embeds=r(2, 8))),
    "Kandinsky5Transformer3DModel": ({}, lambda: dict(hidden_states=r(2, 2, 6, 8, 4), encoder_hidden_states=r(2, 5, 16),
        pooled_projections=r(2, 8), **STEPS, text_rope_pos=torch.arange(5), visual_rope_pos=[torch.arange(2),
        torch.arange(3), torch.arange(4)])),
    "Kandinsky6Transformer3DModel": (dict(in_audio_dim=4, out_audio_dim=4, text_token_padding=True, ca_rope=True,
        cross_gates=True, fix_modulation=True), lambda: dict(hidden_states=r(2, 2, 6, 8, 9),
        encoder_hidden_states=r(2, 5, 16), pooled_projections=r(2, 8), **STEPS, audio_hidden_states=r(2, 7, 4))),
    "Kandinsky6SRTransformer3DModel": (dict(nabla_window=(3, 1, 1)), lambda: dict(hidden_states=r(2, 2, 8, 8, 9),
        **STEPS)),
    "AceStepTransformer1DModel": (dict(in_channels=12, audio_acoustic_hidden_dim=4, sliding_window=4),
        lambda: dict(hidden_states=r(2, 16, 4), **TIMES, timestep_r=torch.tensor([0.125, 0.25]),
        encoder_hidden_states=r(2, 5, 64), context_latents=r(2, 16, 8))),
    "AnyFlowTransformer3DModel": ({}, anyflow),
    "AnyFlowFARTransformer3DModel": ({}, lambda: anyflow(chunk_partition=[1, 1])),
    "ChronoEditTransformer3DModel": ({}, video),
    "ConsisIDTransformer3DModel": (dict(patch_size=2, is_train_face=True, cross_attn_interval=1, cross_attn_dim_head=4,
        cross_attn_num_heads=2, LFE_id_dim=4, LFE_vit_dim=4, LFE_depth=5, LFE_dim_head=4, LFE_num_heads=2,
        LFE_num_id_token=1, LFE_num_querie=1, LFE_output_dim=42, LFE_ff_mult=1, LFE_num_scale=1),
        lambda: cogvideox(id_cond=r(2, 4), id_vit_hidden=[r(2, 3, 4)])),
    "EasyAnimateTransformer3DModel": (dict(mmdit_layers=1, patch_size=2), video),
    "ErnieImageTransformer2DModel": (dict(ffn_hidden_size=32, text_in_dim=16), lambda: dict(hidden_states=r(2, 4, 3, 4),
        **STEPS, text_bth=r(2, 5, 16), text_lens=torch.tensor([5, 3]))),
    "Flux3Transformer2DModel": (dict(cond_in_channels=4, timestep_channels=32, axes_dims_rope=(8, 8, 8, 8)),
        lambda: tokens(4, image_cond_hidden_states=r(2, 4, 4), image_cond_ids=grid(1, 2, 2, 1) + 1)),
    "GlmImageTransformer2DModel": (dict(condition_dim=4, prior_vq_quantizer_codebook_size=16),
        lambda: image(prior_token_id=torch.randint(16, (2, 12)), prior_token_drop=torch.zeros(2, dtype=torch.bool),
        target_size=torch.tensor([[48.0, 64.0]] * 2), crop_coords=torch.zeros(2, 2))),
    "HeliosTransformer3DModel": (dict(rope_dim=(8, 12, 12)), lambda: video(size=(2, 8, 8),
        indices_hidden_states=torch.arange(7, 9).repeat(2, 1), indices_latents_history_short=torch.tensor([[0, 6]] * 2),
        latents_history_short=r(2, 4, 2, 8, 8), indices_latents_history_mid=torch.arange(4, 6).repeat(2, 1),
        latents_history_mid=r(2, 4, 2, 8, 8), indices_latents_history_long=torch.arange(4).repeat(2, 1),
        latents_history_long=r(2, 4, 4, 8, 8))),
    "JoyImageEditTransformer3DModel": ({}, lambda: video(size=(1, 6, 8))),
    "JoyImageEditPlusTransformer3DModel": ({}, lambda: dict(hidden_states=r(2, 12, 4, 1, 2, 2),
        encoder_hidden_states=r(2, 5, 16), **STEPS, encoder_hidden_states_mask=torch.ones(2, 5), shape_list=[[(1, 2, 2),
        (1, 2, 4)], [(1, 3, 3)]])),
    "Krea2Transformer2DModel": (dict(timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=2,
        text_num_attention_heads=2, text_num_key_value_heads=1, text_intermediate_size=16, num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1), lambda: dict(hidden_states=r(2, 12, 4), encoder_hidden_states=r(2, 5, 2, 16),
        **TIMES, encoder_attention_mask=ones(2, 5), position_ids=torch.cat([torch.zeros(5, 3), grid(1, 3, 4)]))),
    "LongCatAudioDiTTransformer": (dict(dit_dim=64, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=4,
        text_conv=False), lambda: dict(hidden_states=r(2, 12, 4), encoder_hidden_states=r(2, 5, 16),
        encoder_attention_mask=ones(2, 5), **TIMES, attention_mask=ones(2, 12), latent_cond=r(2, 12, 4))),
    "LongCatImageTransformer2DModel": ({}, tokens),
    "MiniMaxH3Transformer3DModel": (dict(hidden_size=32, freq_dim=8, time_embed_hidden_dim=8, rope_freq_dim=4),
        minimax_h3),
    "MiniMaxMusic3Transformer1DModel": (dict(condition_dim=16, ff_inner_dim=32, rotary_dim=16, fourier_embedding_dim=8),
        lambda: dict(hidden_states=r(2, 4, 12), encoder_hidden_states=r(2, 12, 16), **TIMES)),
    "MotifVideoTransformer3DModel": (dict(num_decoder_layers=1, patch_size=2, enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True), lambda: video(encoder_attention_mask=ones(2, 5),
        image_embeds=r(2, 3, 8))),
    "NucleusMoEImageTransformer2DModel": (dict(in_channels=16, mlp_ratio=4.0, moe_enabled=False,
        capacity_factors=[8.0, 8.0]), qwen_image),
    "OvisImageTransformer2DModel": ({}, tokens),
    "PRXTransformer2DModel": (dict(mlp_ratio=1.0, axes_dim=[16, 16]), lambda: image(times=TIMES,
        attention_mask=ones(2, 5))),
    "QwenImage21Transformer2DModel": (dict(mlp_ratio=1), lambda: dict(hidden_states=r(2, 16, 4),
        encoder_hidden_states=r(2, 5, 16), **TIMES, img_shapes=[[(1, 4, 4)]] * 2, img_mask=torch.tensor([[False] * 5 +
        [True] * 4] * 2))),
    "SanaVideoTransformer3DModel": (dict(num_cross_attention_heads=2, cross_attention_head_dim=32, mlp_ratio=1.0,
        sample_size=8, rope_max_seq_len=32), video),
    "SanaWMTransformer3DModel": (dict(mlp_ratio=1.0), sana_wm),
    "SanaWMTransformer3DModel, camera": (dict(mlp_ratio=1.0), lambda: sana_wm(camera_conditions=camera())),
    "SanaWMLTX2RefinerTransformer3DModel": ({}, lambda: refiner("interleaved")),
    "SanaWMLTX2RefinerTransformer3DModel, split": (dict(rope_type="split"), lambda: refiner("split")),
    "StableAudio3DiTModel": ({}, stable_audio3),
    "StableAudio3DiTModel, one attention": (dict(use_differential_attention=False), stable_audio3),
    "WanAnimateTransformer3DModel": (dict(in_channels=12, latent_channels=4, image_dim=8,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16}, motion_encoder_size=16, motion_style_dim=8,
        motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16, face_encoder_num_heads=2,
        inject_face_latents_blocks=2), lambda: video(12, (3, 6, 8), encoder_hidden_states=r(2, 512, 16),
        encoder_hidden_states_image=r(2, 7, 8), pose_hidden_states=r(2, 4, 2, 6, 8),
        face_pixel_values=r(2, 3, 5, 16, 16))),
    "WanAnimate2Transformer3DModel": (dict(in_dim=8, out_dim=4), lambda: dict(hidden_states=[r(4, 2, 6, 8)],
        timestep=torch.tensor([250.0]), encoder_hidden_states=[r(5, 16)], condition_latents=[r(4, 2, 6, 8)],
        encoder_hidden_states_image=r(1, 3, 1280), kv_cache=WanAnimate2KVCache(2), kv_cache_mode="extract", seq_len=24,
        offset_grid_sizes=torch.tensor([[2, 3, 4]]))),
    "Cosmos3OmniTransformer": (dict(latent_channel=4, latent_patch_size=1, patch_latent_dim=4, rope_axes_dim=[6, 5, 5]),
        lambda: dict(input_ids=torch.arange(5), text_indexes=torch.arange(5), und_len=5, sequence_length=17,
        position_ids=torch.cat([torch.arange(5).repeat(3, 1), 5 + grid(1, 3, 4).long().T], dim=1),
        vision_tokens=[r(1, 4, 1, 3, 4)], vision_token_shapes=[(1, 3, 4)], vision_sequence_indexes=torch.arange(5, 17),
        vision_mse_loss_indexes=torch.arange(5, 17), vision_timesteps=torch.full((12,), 500.0),
        vision_noisy_frame_indexes=[torch.tensor([0])])),
    "Ideogram4Transformer2DModel": (dict(adaln_dim=8, llm_features_dim=16, rope_theta=10000, mrope_section=(6, 5, 5)),
        ideogram4),
}
# fmt: on


# The names of the parameters that make queries and keys.
QK = re.compile(r"to_q|to_k|add_[qk]_proj|[qk]_proj|qkv|query|key|norm_q|norm_k|norm_added_[qk]|[qk]_norm")


def make(name):
    config, (_, inputs) = config_of(name), TABLE[name]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(diffusers, name.partition(",")[0])(**config).eval()
        for key, parameter in model.named_parameters():
            gain = 2 if QK.search(key) else 1
            if parameter.ndim > 1:
                parameter.normal_(std=gain * parameter[0].numel() ** -0.5)
            elif key.endswith(("weight", "gamma")):  # of a norm
                parameter.uniform_(0.5 * gain, 1.5 * gain)
            else:
                parameter.normal_(std=0.1)
        return model.requires_grad_(name not in FORWARD_ONLY), inputs()


MODELS = {name: functools.partial(make, name) for name in TABLE}
# The models with layers that fuse=True fuses.
FUSED = """Flux Flux2 Chroma Bria BriaFibo BriaFibo2 LongCatImage OvisImage QwenImage ZImage HunyuanImage HunyuanVideo
    HunyuanVideo15 HunyuanVideoFramepack MotifVideo Wan WanVACE WanAnimate SkyReelsV2 ChronoEdit"""
FUSED = {name for name in MODELS if name.partition("Transformer")[0] in FUSED.split()}
