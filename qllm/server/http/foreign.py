"""Names of fields that this route does not serve, each with what it could do to an answer.

The fields are those of OpenAI, Anthropic, vLLM, SGLang, llama.cpp, Ollama, OpenRouter and LiteLLM,
and of our other routes. A name in no table counts as one that could change the answer.
"""

from enum import Enum
from typing import Any


class Effect(Enum):
    """The effect of a field on the answer of a server that supports the field."""

    NONE = "none"
    """It cannot change the answer: it is accepted."""
    CHANGES = "changes"
    """It could change the answer: it is left out, and reported."""
    HOLDS = "holds"
    """It constrains or ends the answer, or is a part of the question: it is refused."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CHAT, _FORM, _TOKENS = ("messages",), ("structured_outputs",), ("max_tokens", "max_output_tokens")
HOLDS: dict[str, tuple[str, ...]] = {
    # the question
    "messages": ("input", "prompt"), "prompt": ("messages", "input"), "system": (*_CHAT, "input"),
    "input": ("messages", "prompt"), "instructions": ("system", *_CHAT), "system_prompt": _CHAT,
    "prompt_id": (), "prompt_embeds": (), "previous_response_id": (), "previous_input_messages": (),
    "conversation": ("input",), "input_ids": ("prompt",), "documents": _CHAT, "mm_payload": (),
    "mm_processor_kwargs": (), "media_io_kwargs": (), "images": (), "image_data": (),
    "audio_data": (), "video_data": (), "multimodal_data": (), "suffix": (), "input_prefix": (),
    "input_suffix": (), "input_extra": (), "prefill": (), "assistant_prefill": (), "prefix": (),
    # tools, and whether and how they are called
    "tools": (), "tool_choice": (), "parallel_tool_calls": ("tool_choice",),
    "functions": ("tools",), "function_call": ("tool_choice",), "grammar_triggers": (),
    # the form of the answer
    "n": (), "n_cmpl": ("n",), "num_return_sequences": ("n",), "candidate_count": ("n",),
    "response_format": ("text", "output_config"), "text": ("response_format", "output_config"),
    "output_config": ("response_format", "text"), "output_format": ("response_format", "text"),
    "structured_outputs": ("response_format", "text", "output_config"),
    "guided_json": _FORM, "guided_regex": _FORM, "guided_choice": _FORM, "guided_grammar": _FORM,
    "guided_json_object": _FORM, "grammar": _FORM, "ebnf": _FORM, "regex": _FORM,
    "json_schema": ("response_format", "text", "output_config"), "structural_tag": (),
    "format": ("response_format", "text"), "response_schema": ("response_format", "text"),
    "response_mime_type": ("response_format", "text"), "modalities": (), "audio": (),
    "logits_processors": (), "custom_logit_processor": (), "logit_bias": (),
    "bad_words": (), "bad_words_ids": ("bad_words",), "allowed_token_ids": (),
    # its end
    "stop": ("stop_sequences",), "stop_sequences": ("stop",), "stop_strings": ("stop",),
    "stop_words": ("stop",), "stop_regex": ("stop",), "stop_token_ids": (), "ignore_eos": (),
    "eos_token_id": ("stop_token_ids",), "early_stopping": (), "repetition_detection": (),
    "max_tokens": _TOKENS, "max_completion_tokens": _TOKENS, "max_output_tokens": _TOKENS,
    "max_new_tokens": _TOKENS, "max_gen_len": _TOKENS, "max_length": _TOKENS,
    "max_tokens_to_sample": _TOKENS, "n_predict": _TOKENS, "num_predict": _TOKENS,
    "min_tokens": (), "min_new_tokens": ("min_tokens",), "min_length": ("min_tokens",),
    "t_max_predict_ms": (), "options": (),
}  # fmt: skip
"""Fields that hold the answer or the question, with the names of ours that mean the same."""

CHANGES = _words(
    """
    adapter adaptive_decay adaptive_target add_generation_prompt add_special_tokens background
    beam_width best_of cache_salt cache_ttl_s chat_template chat_template_content_format
    chat_template_kwargs compaction container context_management continue_final_message
    custom_params detokenize do_sample dry_allowed_length dry_base dry_multiplier
    dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range echo
    enable_response_messages enable_thinking ensure_alternating_roles epsilon_cutoff eta_cutoff
    exclude_reasoning frequency_penalty guardrails guidance_scale image image_config include
    include_reasoning include_stop_str_in_output keep_reasoning length_penalty
    litellm_system_prompt logprob_token_ids logprobs lora lora_path lora_request mcp_servers
    merge_reasoning_content_in_choices min_keep min_p mirostat mirostat_eta mirostat_tau
    mock_response n_keep n_probs negative_prompt no_repeat_ngram_size no_stop_trim num_beams
    num_ctx parse_tool_calls penalize_nl plugins post_sampling_probs presence_penalty preset
    prompt_logprobs random_seed raw reasoning reasoning_budget reasoning_effort reasoning_format
    repeat_last_n repeat_penalty repetition_penalty response_fields return_hidden_states
    return_logprob return_meta_info return_prompt_text return_prompt_token_ids
    return_routed_experts return_text_in_logprobs return_token_ids return_token_offsets
    return_tokens return_tokens_as_token_ids safe_prompt samplers seed separate_reasoning
    session_params skip_special_tokens slo spaces_between_special_tokens stream_reasoning task
    temperature template tfs_z think thinking thinking_budget thinking_budget_tokens
    thinking_forced_open thinking_token_budget thread top_a top_k top_logprobs top_n_sigma top_p
    transforms truncate truncate_prompt_tokens truncation truncation_side typical typical_p
    use_beam_search verbosity vllm_xargs watermarking web_search_options xtc_probability
    xtc_threshold
    """
)
"""Fields that could change the text, or ask for more than the text."""

NONE = _words(
    """
    access_programs allowed_openai_params anthropic_beta anthropic_version api_base api_key
    api_version backend_sampling background_options base_url betas billing_policy bootstrap_host
    bootstrap_port bootstrap_room cache cache_control cache_key cache_prompt caching
    client_metadata custom_labels custom_llm_provider data_parallel_rank debug deployment_id
    diagnostics disable_fallbacks disagg_prefill_dp_rank draft_tokens drop_params ec_transfer_params
    extra_body extra_headers extra_key fallback_credit_token fallbacks guided_decoding_backend
    guided_whitespace_pattern headers id_slot inference_geo keep_alive kv_transfer_params
    litellm_call_id litellm_metadata litellm_session_id litellm_trace_id log_metrics
    max_parallel_requests max_retries max_tool_calls metadata models moderation n_cache_reuse
    ngram_corpus_id no-log num_retries organization prediction priority prompt_cache_key
    prompt_cache_options prompt_cache_retention provider proxy_server_request request_id
    request_timeout return_cached_tokens_details return_mm_kwargs return_progress rid route
    routed_dp_rank routed_experts_prompt_start routed_experts_start_len rpm safety_identifier
    service_tier session_id speed sse_ping_interval store stream stream_interval stream_options
    stream_timeout tags timeout timings_per_token tpm trace ttl usage user user_id
    user_profile_id workspace_id
    """
)
"""Fields about routing, keeping, counting, caching and speed."""

_NOTHING: tuple[Any, ...] = (None, "", [], {})
_NO_SCHEMA: tuple[Any, ...] = (None, "")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "background": (False,), "best_of": (1,),
    "chat_template_content_format": ("auto",), "continue_final_message": (False,),
    "detokenize": (True,), "early_stopping": (False,), "echo": (False,),
    "enable_response_messages": (False,), "ensure_alternating_roles": (False,),
    "exclude_reasoning": (False,), "frequency_penalty": (0,), "function_call": ("none", "auto"),
    "functions": ("none",), "ignore_eos": (False,), "include_reasoning": (True,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "logprobs": (False,),
    "merge_reasoning_content_in_choices": (False,), "min_length": (0,), "min_new_tokens": (0,),
    "min_p": (0,), "min_tokens": (0,), "mirostat": (0,), "mm_payload": ("tensors",),
    "modalities": (["text"],), "n": (1,), "n_cmpl": (1,), "n_probs": (0,), "no_stop_trim": (False,),
    "num_beams": (1,), "num_return_sequences": (1,), "parallel_tool_calls": (True,),
    "parse_tool_calls": (True,), "presence_penalty": (0,), "repeat_penalty": (1,),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},),
    "return_hidden_states": (False,), "return_prompt_text": (False,),
    "return_routed_experts": (False,), "return_token_ids": (False,),
    "return_token_offsets": (False,), "return_tokens_as_token_ids": (False,),
    "safe_prompt": (False,), "separate_reasoning": (True,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "stream_reasoning": (True,), "tfs_z": (1,),
    "tool_choice": ("none", "auto"), "top_a": (0,), "top_logprobs": (0,),
    "truncation": ("disabled",), "truncation_side": ("left",), "typical_p": (1,),
    "use_beam_search": (False,), "verbosity": ("medium",), "xtc_probability": (0,),
    "text": ({"format": {"type": "text"}},),
}  # fmt: skip
"""Values that ask for nothing, beside null and what is empty."""
SCHEMAS = frozenset(
    {"format", "guided_json", "json_schema", "output_format", "response_schema"}
    | {"structured_outputs"}
)
"""Fields in which `{}` is a schema: that of any value."""


def effect_of(name: str) -> Effect:
    """Return what a field could do to the answer."""
    if name in HOLDS:
        return Effect.HOLDS
    return Effect.NONE if name in NONE else Effect.CHANGES


def is_neutral(name: str, value: Any) -> bool:
    """Return True if a field's value asks for nothing."""
    nothing = _NO_SCHEMA if name in SCHEMAS else _NOTHING
    return value in nothing or value in NEUTRAL.get(name, ())
