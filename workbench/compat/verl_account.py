"""Says of every setting of a verl command what becomes of it, and names those that contradict each other.

One table says it of every key: key → kind, place here, note; `docs/verl.md` is made of it, too. A line is `key | kind
| place | note | default`. A key may have `{a,b}` for several and `*` for any rest; the first line that fits counts. A
`*` in the place is the last word of the key: `{gamma,lam}` at `ppo(*)` are `ppo(gamma)` and `ppo(lam)`.

Kinds: `exact`, the same here; `near`, the same but as the note says; `hardware`, changes no number; `refused`,
changes numbers and is not here; `alias`, another spelling of the key in its place. After `unless` stand the values
with which a key says what is so here anyway (`+`: a number above 0); after `if` the key without which it means
nothing, or `critic`, `gae` and the like. The default `=` says that verl's is ours, too, which a test compares beside
verl.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from workbench import functional as F
from workbench.base.errors import SettingError, describe, nearest
from workbench.compat.verl_command import Command, keys, parsed
from workbench.compat.verl_reward import cannot, contradictions, read_block
from workbench.rewards.managers import MANAGERS

TABLE = """
actor_rollout_ref.actor.optim.{lr,betas,weight_decay} | exact | LocalSettings.* |  | =
actor_rollout_ref.actor.{optim.clip_grad,grad_clip} | exact | LocalSettings.grad_clip |  | =
actor_rollout_ref.actor.optim.lr_scheduler_type | near unless constant | LocalSettings.schedule | by optimizer steps, where verl counts training steps
actor_rollout_ref.actor.optim.{warmup_style,lr_decay_style,lr_scheduler_name} | alias | actor_rollout_ref.actor.optim.lr_scheduler_type
actor_rollout_ref.actor.optim.lr_warmup_steps | near unless null -1 0 | LocalSettings.warmup_steps | by optimizer steps, where verl counts training steps; the first step has 1/n of the rate, where verl's has 0
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio | near unless null 0 | LocalSettings.warmup_steps | of all optimizer steps, where verl counts training steps; the first step has 1/n of the rate, where verl's has 0
actor_rollout_ref.actor.optim.total_training_steps | near | — | the schedule is as long as the run
actor_rollout_ref.actor.optim.{optimizer,name} | refused unless AdamW adamw adam | — | AdamW
actor_rollout_ref.actor.optim.{min_lr_ratio,min_lr,min_lr_factor} | refused unless null 0 if decay | — | cosine goes down to 0
{actor_rollout_ref.actor,critic}.optim.lr_decay_steps | refused unless null 0 if decay | — | the schedule is as long as the run
{actor_rollout_ref.actor.optim.lr_warmup_init,optim.init_lr_ratio} | refused unless null 0 | — | a warm-up begins at 1/n of the rate
actor_rollout_ref.actor.optim.num_cycles | refused unless null 0.5 | — | cosine is half a period
actor_rollout_ref.actor.optim.optimizer_impl | refused unless torch.optim | — | torch's AdamW
{actor_rollout_ref.actor,critic}.optim.override_optimizer_config.{optimizer_cpu_offload,optimizer_offload_fraction,offload_fraction,overlap_cpu_optimizer_d2h_h2d} | hardware | — | where the optimizer's state is
{actor_rollout_ref.actor,critic}.optim.override_optimizer_config.use_precision_aware_optimizer | near | — | moments are float32 here
{actor_rollout_ref.actor,critic}.optim.{eps,min_lr,min_lr_factor,lr_min,lr_start,lr_warmup_init,lr_wsd_decay_steps,use_checkpoint_opt_param_scheduler,use_precision_aware_optimizer,use_layer_wise_distributed_optimizer} | refused unless null 0 False 1e-08 | — | AdamW with the settings of LocalSettings
{actor_rollout_ref.actor,critic}.optim.{grad_clip,lr_decay_ratio} | refused unless null 1 | — | AdamW with the settings of LocalSettings
{actor_rollout_ref.actor,critic}.optim.zero_indexed_step | refused unless null True | — | steps count from 0
{actor_rollout_ref.actor,critic}.optim.{decay_type,weight_decay_incr_style,lr_wsd_decay_style} | refused unless null constant exponential | — | the schedule is constant or cosine, the weight decay constant
{actor_rollout_ref.actor,critic}.optim.{main_grads_dtype,exp_avg_dtype,exp_avg_sq_dtype} | refused unless null fp32 | — | gradients and moments are float32
{actor_rollout_ref.actor,critic}.optim.muon_{momentum,nesterov,split_qkv,scale_mode,coefficient_type,num_ns_steps,tp_mode,fp32_matmul_prec,extra_scale_factor,scalar_optimizer,match_adamw_update_rms} | refused unless null 0.95 True False spectral quintic 5 blockwise medium 1 adam | — | no Muon
{actor_rollout_ref.actor,critic}.optim.override_optimizer_config* | refused unless null {} 0 False fp32 | — | AdamW with the settings of LocalSettings
actor_rollout_ref.actor.ppo_max_token_len_per_gpu | hardware | LocalSettings.micro_batch_tokens |  | =
actor_rollout_ref.actor.use_dynamic_bsz | hardware | — | always: a micro-batch is a budget of tokens, and changes memory alone
actor_rollout_ref.actor.{ppo_micro_batch_size,ppo_micro_batch_size_per_gpu} | hardware | — | a micro-batch is a budget of tokens, and changes memory alone
actor_rollout_ref.actor.ppo_mini_batch_size | exact | grpo(ppo_mini_batch_size) | prompts, as in verl | None, the whole batch, where verl has 256
actor_rollout_ref.actor.ppo_epochs | exact | grpo(ppo_epochs) |  | =
actor_rollout_ref.actor.shuffle | exact | Update(shuffle) |  | =
{actor_rollout_ref.actor,critic}.data_loader_seed | near | — | the order within a batch follows the run's seed
actor_rollout_ref.actor.clip_ratio | near unless 0.2 | PolicyLoss.clip_ratio_low | low and high, where those are not given; in verl their own 0.2 outranks it, so that it alone has no effect there
actor_rollout_ref.actor.{clip_ratio_low,clip_ratio_high,clip_ratio_c,tau_pos,tau_neg,entropy_coeff,loss_agg_mode,loss_scale_factor} | exact | PolicyLoss.* |  | =
actor_rollout_ref.actor.policy_loss.tau_{pos,neg} | exact | PolicyLoss.* | sapo's
actor_rollout_ref.{actor.calculate_entropy,rollout.calculate_log_probs} | near unless True | — | always
actor_rollout_ref.actor.use_kl_loss | exact | PolicyLoss.kl_coef | on where it is not 0
actor_rollout_ref.actor.kl_loss_coef | exact if actor_rollout_ref.actor.use_kl_loss | grpo(kl_coef) |  | =
actor_rollout_ref.actor.kl_loss_type | exact if actor_rollout_ref.actor.use_kl_loss | PolicyLoss.kl_type |  | =
actor_rollout_ref.actor.policy_loss.{loss_mode,clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef} | exact | PolicyLoss.* |  | =
actor_rollout_ref.actor.{loss_mode,clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef} | alias | actor_rollout_ref.actor.policy_loss.*
actor_rollout_ref.actor.policy_loss.dro_beta | exact | PolicyLoss.dro_beta |  | 0.1, where verl has none and asks for one
actor_rollout_ref.actor.tis_imp_ratio_cap | refused unless null -1 0 | — | write algorithm.rollout_correction.rollout_is=token, rollout_is_threshold
actor_rollout_ref.actor.calculate_sum_pi_squared | exact | LogProb(sum_pi_squared) | where the estimator reads it | =
actor_rollout_ref.actor.freeze_vision_tower | refused unless False | — | every weight, or LoRA's, is trained
actor_rollout_ref.actor.{fsdp_config,veomni,torchtitan,megatron,engine}.{param_offload,optimizer_offload,grad_offload,offload_policy,enable_fsdp_offload} | hardware | FsdpSettings.offload | "all" or "optimizer" | none, as in verl
actor_rollout_ref.actor.fsdp_config.reshard_after_forward | hardware | FsdpSettings.reshard_after_forward |  | =
actor_rollout_ref.actor.{,fsdp_config.}ulysses_sequence_parallel_size | hardware | FsdpSettings.mesh | the mesh's `cp` | 1, as in verl
actor_rollout_ref.actor.fsdp_config.fsdp_size | hardware | FsdpSettings.mesh | the mesh's `dp`; `replicate` is ranks / dp | all ranks, as in verl
actor_rollout_ref.actor.fsdp_config.{use_no_sync_for_gradient_accumulation,forward_prefetch,use_orig_params,strategy,forward_only,use_torch_compile,entropy_checkpointing,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,pad_to_length,pad_to_length_bucket,wrap_policy.*} | hardware | — | how ranks share the work
actor_rollout_ref.actor.{strategy,model_engine,use_torch_compile,entropy_checkpointing,entropy_from_logits_with_chunking,sum_pi_squared_checkpointing,use_prefix_grouper,use_fused_kernels,use_remove_padding,pad_to_length,rollout_n,entropy_from_logits_chunk_size} | hardware | — | how the work is done
{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.model.fsdp_config,critic.fsdp_config,critic.fsdp}.{dtype,model_dtype,mixed_precision.*} | near | LocalSettings.dtype | weights are float32, passes bfloat16 on a GPU (`auto`): rounds otherwise
actor_rollout_ref.actor.fsdp_config.seed | near | — | everything follows the run's seed
actor_rollout_ref.actor.fsdp_config.full_determinism | near unless False | — | always on a CPU; on a GPU as its kernels are
{actor_rollout_ref.actor.qat,actor_rollout_ref.actor.fsdp_config.qat,actor_rollout_ref.actor.megatron.qat,actor_rollout_ref.ref.megatron.qat,critic.megatron.qat}.enable | refused unless False | — | no quantised training
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{,megatron.,fsdp_config.,veomni.}router_replay.mode | refused unless null disabled R3 | — | R3 alone: see actor_rollout_ref.rollout.enable_rollout_routing_replay
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{,megatron.,fsdp_config.,veomni.}router_replay.{record_file,replay_file} | refused unless null | — | no router replay from files
actor_rollout_ref.actor.qat.* | hardware if actor_rollout_ref.actor.qat.enable | — | of quantised training
actor_rollout_ref.actor.fsdp_config.qat.* | hardware if actor_rollout_ref.actor.fsdp_config.qat.enable | — | of quantised training
actor_rollout_ref.actor.megatron.qat.* | hardware if actor_rollout_ref.actor.megatron.qat.enable | — | of quantised training
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_transformer_config.{moe_aux_loss_coeff,moe_z_loss_coeff,moe_router_bias_update_rate,moe_expert_capacity_factor,dsa_indexer_loss_coeff,attention_dropout,hidden_dropout} | refused unless null 0 | — | no loss or dropout of its own inside the model
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_transformer_config.{moe_router_load_balancing_type,moe_router_enable_expert_bias,fp8,fp8_recipe,dsa_indexer_use_sparse_loss} | refused unless null none False | — | the model as transformers has it
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_transformer_config.{moe_router_dtype,attention_backend,context_parallel_algo} | near | — | rounds otherwise
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_transformer_config.{normalization,swiglu,multi_latent_attention,use_arbitrary_attention_mask} | near | — | the model is as its own configuration says
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_transformer_config.{recompute_*,account_for_*,pipeline_model_parallel_layout,num_layers_in_*,*fusion,*fused*,use_*,moe_grouped_gemm,moe_enable_deepep,moe_token_dispatcher_type,moe_shared_expert_overlap,deallocate_pipeline_outputs,persist_layer_norm,context_parallel_size,tensor_model_parallel_size,sequence_parallel,sequence_packing_scheduler,cp_partition_mode,max_seqlen_per_dp_cp_rank} | hardware | — | how Megatron lays the model out
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_transformer_config | refused unless null {} | — | the model as transformers has it
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_transformer_config.* | refused | — | may be another model than transformers' own
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_ddp_config* | near unless null {} | — | gradients are float32: rounds otherwise
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.override_mcore_model_config* | refused unless null {} | — | transformers' model, not Megatron's
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{megatron,veomni,torchtitan,engine}.{dtype,mixed_precision,enable_mixed_precision,attn_implementation,attn_type,attention_backend_override,*_implementation,force_use_huggingface} | near | — | rounds otherwise
actor_rollout_ref.actor.megatron.tensor_model_parallel_size | hardware | FsdpSettings.mesh | the mesh's `tp`: cluster.place(mesh={"tp": …}), engines.fsdp(…, mesh={"tp": …}) | 1, as in verl
actor_rollout_ref.actor.megatron.context_parallel_size | hardware | FsdpSettings.mesh | the mesh's `cp` | 1, as in verl
actor_rollout_ref.actor.megatron.expert_model_parallel_size | hardware | FsdpSettings.mesh | the mesh's `ep` | 1, as in verl
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.{pipeline_model_parallel_size,virtual_pipeline_model_parallel_size} | hardware | — | layers are not spread over ranks here: FSDP's `dp` and the mesh's `tp` and `cp` hold the model
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{megatron,veomni,torchtitan,engine}.{*parallel_size,param_offload,grad_offload,optimizer_offload,dist_checkpointing_path,use_dist_checkpointing,*mbridge,sequence_parallel,use_distributed_optimizer,use_megatron_fsdp,use_remove_padding,use_torch_compile,activation_checkpoint,spmd_backend,fsdp_size,data_parallel_shard_size,data_parallel_replicate_size,enable_full_shard,cp,ep,etp,pp,tp,vpp,impl_cfg.*,reshard_after_forward,forward_prefetch,enable_forward_prefetch,use_orig_params,wrap_policy.*,entropy_*,strategy,forward_only,init_device,ckpt_manager,enable_fsdp_offload,enable_reentrant,activation_gpu_limit,basic_modules,pad_to_length,pad_to_length_bucket,pad_bshd_to_minibatch_max,dist_checkpointing_prefix,dist_ckpt_optim_fully_reshardable,distrib_optim_fully_reshardable_mem_efficient,dynamic_context_parallel,max_seqlen_per_dp_cp_rank,data_parallel_mode,max_seq_len,use_fused_kernels,use_dynamic_bsz} | hardware | — | how ranks share the work
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{megatron,veomni,torchtitan,engine}.extra | refused unless null {} | — | of that engine; the model is transformers' own
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{veomni,torchtitan}.load_checkpoint_path | refused unless null | — | open(model=…)
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{veomni,torchtitan}.full_determinism | near | — | always on a CPU; on a GPU as its kernels are
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.{megatron,veomni,torchtitan}.seed | near | — | everything follows the run's seed
{actor_rollout_ref.ref,critic}.megatron.qat.* | near | — | of quantised training, which is refused
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.turbo_config.distributed.fsdp_plan.{param_dtype,reduce_dtype,output_dtype} | near | — | rounds otherwise
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.turbo_config.{distributed,memory,module_patches}* | hardware | — | how ranks share the work
actor_rollout_ref.actor.checkpoint.{save_contents,async_save,strict,mbridge_config} | hardware | — | weights, optimizer, schedule and controllers are always saved
{actor_rollout_ref.actor,critic}.checkpoint.* | near | train(resume) | everything is saved and loaded, or nothing
{ray_init,ray_kwargs}.timeline_json_file | hardware | — | not written by itself: `cluster.timeline.save(path)` | none, as in verl
{actor_rollout_ref.actor.profiler,actor_rollout_ref.ref.profiler,actor_rollout_ref.rollout.profiler,critic.profiler,reward_model.profiler,profiler,global_profiler,ray_kwargs,ray_init,transfer_queue}.* | hardware | — | see wb.cluster
hydra.* | hardware | — | where verl's configuration files and logs are
*@* | near | — | chooses one of verl's own configuration files, which is not read: give the settings of it that matter
actor_rollout_ref.{nccl_timeout,hybrid_engine} | hardware | — | who runs where
actor_rollout_ref.model.path | exact | engines.local(path) | open(model=…) takes another
actor_rollout_ref.model.enable_gradient_checkpointing | hardware | LocalSettings.gradient_checkpointing | results are the same | off, where verl has it on
actor_rollout_ref.model.use_remove_padding | hardware | LocalSettings.pack | results are the same | auto, where verl has it on
actor_rollout_ref.model.{enable_activation_offload,use_shm,use_liger,use_fused_kernels,fused_kernel_options.*,tiled_mlp.*} | hardware | — | memory and kernels
actor_rollout_ref.model.{lora_rank,trust_remote_code} | exact | LocalSettings.* |  | =
actor_rollout_ref.model.lora_alpha | exact if actor_rollout_ref.model.lora_rank | LocalSettings.lora_alpha |  | 32, where verl has 16
actor_rollout_ref.model.target_modules | near if actor_rollout_ref.model.lora_rank | LocalSettings.lora_targets | names are the same; all-linear is the seven of Llama-shaped models | the attention's four, where verl has all-linear
actor_rollout_ref.{model,actor}.lora.{rank,r} | alias | actor_rollout_ref.model.lora_rank
actor_rollout_ref.{model,actor}.lora.{alpha,lora_alpha} | alias | actor_rollout_ref.model.lora_alpha
actor_rollout_ref.{model,actor}.lora.target_modules | alias | actor_rollout_ref.model.target_modules
actor_rollout_ref.actor.lora.enable | exact | LocalSettings.lora_rank | the guide's; without a rank 16
actor_rollout_ref.model.lora.{dropout,lora_dropout} | exact if actor_rollout_ref.model.lora_rank | LocalSettings.lora_dropout
{actor_rollout_ref.model,critic.model}.lora.{lora_A_init_method,lora_B_init_method} | near | — | A is random, B is 0
{actor_rollout_ref.model,critic.model}.lora.{merge,fully_sharded_loras,dtype,a2a_experimental} | near | — | peft's adapters
{actor_rollout_ref.model,critic.model}.lora.type | refused unless null lora | — | LoRA's adapters
{actor_rollout_ref.model,critic.model}.lora.dropout_position | refused unless null pre | — | dropout is before the adapters
{actor_rollout_ref.model,critic.model}.lora.{adapter_path,exclude_modules,use_dora} | refused unless null False [] {} | — | open(model=folder of the adapter); name the layers that get adapters
{actor_rollout_ref.model,critic.model}.lora.{freeze_vision_model,freeze_vision_projection,freeze_language_model} | refused unless null True | — | the base is frozen whole
actor_rollout_ref.model.exclude_modules | refused unless null DONT_EXCLUDE | LocalSettings.lora_targets | name the layers that get adapters
actor_rollout_ref.model.lora_adapter_path | refused unless null | engines.local(path) | open(model=folder of the adapter)
actor_rollout_ref.model.override_config.attn_implementation | exact | LocalSettings.attn_implementation
actor_rollout_ref.model.override_config.{attention_dropout,embd_pdrop,resid_pdrop} | refused unless null 0 | — | change the model's config.json
actor_rollout_ref.model.override_config.{max_position_embeddings,model_config.max_position_embeddings} | near | — | the model's own config.json says it
{actor_rollout_ref.model,critic.model}.override_config.moe_config.freeze_moe_router | refused unless null False | — | every weight, or LoRA's, is trained
{actor_rollout_ref.model,critic.model}.override_config* | refused unless null {} | — | change the model's config.json
actor_rollout_ref.model.torch_dtype | near | LocalSettings.dtype | rounds otherwise
actor_rollout_ref.model.{tokenizer_path,hf_config_path,custom_chat_template,external_lib} | refused unless null | engines.local(path) | the model's folder has tokenizer, chat template and code
actor_rollout_ref.model.mtp.{enable,enable_train,enable_rollout} | refused unless False | — | no multi-token prediction
actor_rollout_ref.model.mtp.* | hardware if actor_rollout_ref.model.mtp.enable | — | of multi-token prediction
actor_rollout_ref.ref.model.path | exact | grpo(reference) | the engine's weights at the start, where it is not given
actor_rollout_ref.ref.{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,log_prob_use_dynamic_bsz,log_prob_max_token_len_per_gpu,ulysses_sequence_parallel_size,strategy,use_torch_compile,entropy_*,rollout_n,pad_to_length,optim.*,fsdp_config.*} | hardware | — | the reference is scored under the policy's settings
actor_rollout_ref.rollout.name | hardware | engines.vllm(…) | this process samples; open(engine=…) takes wb.engines.paired, fsdp or a cluster's
actor_rollout_ref.rollout.n | exact | grpo(group_size) |  | 8, where verl has 1
algorithm.group_size | alias | actor_rollout_ref.rollout.n
actor_rollout_ref.rollout.{temperature,top_p,top_k,ignore_eos} | exact | SamplingSettings.* |  | =
actor_rollout_ref.rollout.response_length | exact | SamplingSettings.max_tokens |  | 128, where verl has 512
actor_rollout_ref.rollout.prompt_length | exact | wb.rows(max_prompt_length) |  | no limit, where verl has 512
actor_rollout_ref.rollout.do_sample | refused unless null True | SamplingSettings.temperature | verl's agent loop does not read it in training; temperature=0 is greedy
actor_rollout_ref.rollout.seed | near | train(seed) | a row's seed is of run, step, prompt and sample
actor_rollout_ref.rollout.dtype | near | — | rounds otherwise
actor_rollout_ref.rollout.logprobs_mode | near | — | log-probs are at the temperature, before top-p and top-k
actor_rollout_ref.rollout.{quantization*,qat*} | refused unless null | — | samples with the weights that are trained
actor_rollout_ref.rollout.over_sample_rate | refused unless null 0 | — | no response is thrown away for being late
actor_rollout_ref.rollout.tensor_model_parallel_size | hardware | VllmSettings.tensor_parallel_size |  | 1, where verl has 2
actor_rollout_ref.rollout.{mode,router_config_path,gpu_memory_utilization,standalone_gpu_memory_utilization,data_parallel_size,expert_parallel_size,pipeline_model_parallel_size,moe_tensor_parallel_size,enforce_eager,free_cache_engine,multi_stage_wake_up,layered_summon,load_format,max_num_batched_tokens,max_num_seqs,max_model_len,enable_chunked_prefill,enable_prefix_caching,cudagraph_capture_sizes,disable_log_stats,scheduling_policy,skip_tokenizer_init,full_determinism,limit_images,enable_sleep_mode,nnodes,n_gpus_per_node,micro_batch_size,log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,log_prob_use_dynamic_bsz,log_prob_max_token_len_per_gpu,checkpoint_engine.*,prometheus.*,trace.*,disaggregation.*,layer_name_map.*,moe_load_balance_metrics_interval} | hardware | — | how the sampler's server works
actor_rollout_ref.rollout.engine_kwargs.*.{kv_cache_dtype,kv_cache_config.dtype,attention_backend} | near | — | rounds otherwise
actor_rollout_ref.rollout.engine_kwargs.*.{quantization*,hf_overrides*,*rope_scaling*,json_model_override_args*,context_length,*generation_config*} | refused unless null {} | — | samples with the model that is trained; its lengths and sampling are settings of their own
actor_rollout_ref.rollout.engine_kwargs* | near | — | the sampler's server's own; not passed on
{actor_rollout_ref.rollout.skip_rollout,skip.rollout.enable} | refused unless False | — | every step samples
actor_rollout_ref.rollout.enable_rollout_routing_replay | exact | LocalSettings.routing_replay | the policy scores and learns with the sampler's experts, as with router_replay.mode=R3 | =
actor_rollout_ref.rollout.skip_dump_dir | hardware | — | see actor_rollout_ref.rollout.skip_rollout
actor_rollout_ref.rollout.mtp* | refused unless null | — | no speculative decoding
actor_rollout_ref.rollout.val_kwargs.n | exact | train(val_samples) |  | =
actor_rollout_ref.rollout.val_kwargs.{temperature,top_p,top_k,do_sample} | near | — | held-out rows are sampled as in training (val/reward) and greedily (val/greedy)
actor_rollout_ref.rollout.multi_turn.enable | exact | ToolAgent | with the tools and interactions that are named
actor_rollout_ref.rollout.multi_turn.{max_assistant_turns,max_user_turns,max_parallel_calls,max_tool_response_length} | exact if multi_turn | ToolAgent(*) |  | =
actor_rollout_ref.rollout.multi_turn.max_turns | alias | actor_rollout_ref.rollout.multi_turn.max_assistant_turns
actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side | near unless middle if multi_turn | ToolAgent(tool_response_truncate_side) | left drops the head and right the tail, as in verl from 0.8 on; before that the other way round | =
actor_rollout_ref.rollout.multi_turn.format | exact if multi_turn | ToolAgent(parser) | the name of a tool parser
actor_rollout_ref.rollout.multi_turn.tool_config_path | exact if multi_turn | agents.load_tools(path) | the same file
{data.tool_config_path,tool_config_path} | alias | actor_rollout_ref.rollout.multi_turn.tool_config_path
actor_rollout_ref.rollout.multi_turn.interaction_config_path | exact if multi_turn | agents.load_interactions(path) | the same file
interaction_config_path | alias | actor_rollout_ref.rollout.multi_turn.interaction_config_path
actor_rollout_ref.rollout.multi_turn.{function_tool_path,num_repeat_rollouts} | refused unless null | ToolAgent(tools) | pass agents.function_tool(f) to a ToolAgent
actor_rollout_ref.rollout.multi_turn.use_inference_chat_template | refused unless False | — | the chat template is used as it is
actor_rollout_ref.rollout.multi_turn.completion_callback | refused unless null | ToolAgent | a loop of your own: agents.register
actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode | hardware | — | tokens are never made again from text
actor_rollout_ref.rollout.agent.default_agent_loop | exact | grpo(agent) | single_turn_agent, tool_agent, or a registered name
actor_rollout_ref.rollout.agent_loop | alias | actor_rollout_ref.rollout.agent.default_agent_loop
actor_rollout_ref.rollout.agent.num_workers | hardware | — | one loop runs all episodes
actor_rollout_ref.rollout.agent.{agent_loop_config_path,agent_loop_manager_class,custom_async_server*} | refused unless null | agents.register | register the class, and name it as default_agent_loop
tool_config.max_tool_calls | exact if multi_turn | ToolAgent(max_tool_calls) | the guide's; calls of a whole episode
tool_config.timeout | exact if multi_turn | ToolAgent(seconds_per_call) | the guide's; seconds of one call
sampling_params.timeout | alias | tool_config.timeout
sampling_params.max_tokens | alias | data.max_response_length
critic.enable | exact | ppo(critic) | the recipe `ppo` has one
critic.optim.lr | exact if critic | ppo(critic_lr) |  | =
critic.optim.{weight_decay,betas} | exact if critic | critic.*
critic.{grad_clip,optim.clip_grad} | exact if critic | critic.grad_clip
critic.optim.{lr_warmup_steps,lr_warmup_steps_ratio} | near unless null -1 0 | critic.warmup_steps | by optimizer steps, where verl counts training steps; the first step has 1/n of the rate, where verl's has 0
critic.optim.{lr_scheduler_type,warmup_style,lr_decay_style} | refused unless null constant | — | the critic's rate is constant
critic.optim.{total_training_steps,min_lr_ratio,num_cycles} | near | — | the critic's rate is constant
critic.optim.{optimizer,name,optimizer_impl} | refused unless AdamW adamw torch.optim adam | — | torch's AdamW
critic.cliprange_value | exact if critic | ValueLoss.cliprange_value |  | =
critic.loss_agg_mode | exact if critic | ValueLoss.loss_agg_mode | as the actor's, where it is not given | token-mean in both
critic.{ppo_epochs,ppo_mini_batch_size,shuffle} | exact if critic | update_critic(*) | the actor's, where it is not given
critic.model.path | exact if critic | engines.local(path).critic() | the policy's weights, where open(model=…) is given
critic.model.{tokenizer_path,external_lib} | refused unless null if critic | — | the policy's tokenizer
critic.model.lora_rank | refused unless null 0 if critic | — | the critic trains all weights, or the policy's LoRA
critic.model.lora.rank | alias | critic.model.lora_rank
critic.model.{lora_alpha,target_modules,lora.alpha,lora.lora_alpha,lora.dropout,lora.lora_dropout,lora.target_modules} | near | — | as the policy's LoRA
critic.model.{exclude_modules,lora_adapter_path} | refused unless null DONT_EXCLUDE | — | as the policy's LoRA
critic.model.mtp.* | near | — | no multi-token prediction
critic.model.{hf_config_path,custom_chat_template} | refused unless null | — | the model's folder has them
critic.loss_scale_factor | refused unless null | — | of seq-mean-token-sum-norm: the batch's width
critic.model.{trust_remote_code,enable_gradient_checkpointing,enable_activation_offload,use_remove_padding,use_shm,use_liger,use_fused_kernels,fused_kernel_options.*} | hardware | — | the critic's engine has the policy's settings
critic.model.tiled_mlp.* | hardware | — | memory
critic.{model.fsdp_config,fsdp_config,fsdp}.* | hardware | FsdpSettings.offload | how ranks share the work
{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.load_weight | refused unless True | — | weights are always loaded
critic.{ppo_micro_batch_size,ppo_micro_batch_size_per_gpu,forward_micro_batch_size,forward_micro_batch_size_per_gpu,use_dynamic_bsz,ppo_max_token_len_per_gpu,forward_max_token_len_per_gpu} | hardware | — | a micro-batch is a budget of tokens, and changes memory alone
critic.{strategy,rollout_n,nccl_timeout,checkpoint.save_contents,checkpoint.async_save} | hardware | — | how the work is done
critic.ulysses_sequence_parallel_size | hardware | FsdpSettings.mesh | the mesh's `cp`
data.train_files | exact | wb.rows(path) | files of rows
data.val_files | exact | train(eval_rows) | held-out rows
data.train_batch_size | exact | train(batch_size) | prompts, as in verl | 16, where verl has 1024
data.gen_batch_size | near | train(batch_size) | the step's size, also of further batches of dynamic sampling; fully asynchronous training takes 1 prompt at a time
data.max_prompt_length | exact | wb.rows(max_prompt_length) |  | no limit, where verl has 512
data.max_response_length | exact | grpo(max_tokens) |  | 128, where verl has 512
data.seed | near | train(seed) | other draws than verl's | 0, where verl has none
data.shuffle | near unless True | train(seed) | rows come in the seed's order, not the file's
data.truncation | near unless error | Rows.fitting(overlong) | a longer prompt is left out, not cut
data.filter_overlong_prompts | exact | Rows.fitting(overlong) | `overlong="drop"`
data.apply_chat_template_kwargs{,.*} | exact | engines.local(template_switches) | further arguments of the chat template
data.prompt_key | exact | wb.rows(prompt) | the column of the prompts
data.reward_fn_key | refused unless data_source | — | rename the column to data_source
data.{train_max_samples,val_max_samples} | near unless null -1 | wb.rows(limit) | the first rows, where verl draws them
data.dataset_weights | exact | datasets.mix(weights) | each batch has rows of each of train_files by its weight
data.{custom_cls.path,datagen.path,sampler.class_path} | refused unless null | wb.rows(records) | make rows of them, in their order, and pass open(train_files=rows)
data.{custom_cls.name,datagen.name,sampler.class_name} | refused unless null | wb.rows(records) | see the path beside it
data.{image_key,video_key,audio_key,mm_processor_kwargs*} | refused unless null images videos audios {} | wb.rows | pictures are in the column images: rename it; the processor has its own settings
data.{image_patch_size,return_multi_modal_inputs} | near | wb.rows | pictures are in the column images
data.{accuracy_lower_bound,accuracy_upper_bound,filter_accuracy,oversample_factor,min_response_length} | refused unless null False | — | a recipe's own
data.{function_tool_path,tokenizer} | refused unless null | — | tools are objects; the tokenizer is the model's
data.{batch_size,output_path} | refused | wb.evaluate | of generation, not of training
data.{micro_batch_size,micro_batch_size_per_gpu,max_token_len_per_gpu,use_dynamic_bsz,pad_mode,balance_dp_token,num_workers,val_batch_size,filter_overlong_prompts_workers,dataloader_num_workers,return_raw_chat,return_raw_input_ids,return_full_prompt,validation_shuffle,trust_remote_code,use_shm} | hardware | — | how rows are read
algorithm.adv_estimator | exact | recipes | the recipe of that name; `gae` is `ppo`
algorithm.gamma | exact if gamma | ppo(gamma) |  | =
algorithm.lam | exact if gae | ppo(lam) |  | =
algorithm.norm_adv_by_std_in_grpo | exact if grpo | grpo(norm_adv_by_std) |  | =
algorithm.use_kl_in_reward | exact | ppo(kl_coef) | on where it is not 0 | off; on in `ppo` and `reinforce_plus_plus`
algorithm.kl_penalty | exact if algorithm.use_kl_in_reward | ppo(kl_type) |  | k1, verl's name for which is kl
algorithm.kl_ctrl.kl_coef | exact if algorithm.use_kl_in_reward | ppo(kl_coef) |  | =
algorithm.kl_ctrl.type | exact if algorithm.use_kl_in_reward | ppo(kl_target) | adaptive where a target is given
algorithm.kl_ctrl.horizon | exact if algorithm.use_kl_in_reward | ppo(kl_horizon) |  | =
algorithm.kl_ctrl.target_kl | exact if algorithm.use_kl_in_reward | AdaptiveKL(target) |  | =
algorithm.filter_groups.enable | exact | dapo(rows) | the recipe `dapo`
algorithm.filter_groups.metric | near if algorithm.filter_groups.enable | — | groups whose rewards are equal are dropped, whatever the metric
algorithm.filter_groups.max_num_gen_batches | near if algorithm.filter_groups.enable | dapo(max_num_gen_batches) | then the step goes on, where verl stops; 0, verl's no limit, is 4 | 4, where verl has 0 for "no limit"
algorithm.filter_groups.max_inflight_gen_batches | hardware | — | one batch at a time
algorithm.use_pf_ppo | exact | Resample | a stage behind the advantage
algorithm.pf_ppo.{reweight_method,weight_pow} | exact if algorithm.use_pf_ppo | Resample(*) |  | =
algorithm.rollout_correction.{rollout_rs_threshold_lower,rollout_token_veto_threshold} | refused unless null | — | of an older version: write rollout_rs and its threshold
algorithm.rollout_correction.rollout_is{,_threshold,_batch_normalize} | exact | RolloutCorrection(*) |  | =
algorithm.rollout_correction.{rollout_rs,rollout_rs_threshold,bypass_mode,loss_type} | exact | recipes.with_rollout_correction | the same names
algorithm.{gdpo_reward_keys,gdpo_reward_weights} | exact if gdpo | Advantage(parts) | names of the reward's parts, and weights
trainer.total_training_steps | near | train(steps) | as many as are asked for; verl ends with total_epochs before that | has to be given
trainer.total_epochs | exact | train(steps) | epochs · rows // batch, where no steps are given
trainer.{save_freq,test_freq} | near unless null + | train(*) | verl's -1 is never; here 0, at the end
trainer.val_before_train | near unless True | — | always, where there are eval_rows; changes no training
trainer.val_only | refused unless False | — | wb.evaluate(model, rows)
trainer.critic_warmup | exact | ppo(critic_warmup) |  | =
trainer.resume_mode | refused unless auto disable | train(resume) | open(model=checkpoint) | never, where verl has auto
trainer.resume_from_path | refused unless null checkpoints/ | engines.local(path) | open(model=checkpoint)
trainer.max_actor_ckpt_to_keep | hardware | train(keep_checkpoints) | at least 2 | 2, where verl keeps all
trainer.max_critic_ckpt_to_keep | hardware | train(keep_checkpoints) | as the actor's
trainer.rollout_data_dir | hardware | train(trace_freq) | whole steps, in the run folder
trainer.validation_data_dir | hardware | train(keep_val) | in the run folder
trainer.default_local_dir | hardware | train(run) | the run folder
trainer.project_name | hardware | train(project) | the project of the trackers; the run folder's name, without the next two
trainer.experiment_name | hardware | train(run) | the run folder's name, without default_local_dir
trainer.run_name | alias | trainer.experiment_name
trainer.logger | hardware | train(trackers) | beside the run folder's own files; without those that are not installed
trainer.scheduler | near unless sync null | train(ahead) | ahead=1: a step ahead at most; so is what one_step_off_policy.main_ppo runs
trainer.v1.trainer_mode | near unless sync null | train(max_lag) | both asynchronous modes are one stream; a learner and a sampler with weights of their own
trainer.v1.sampler.max_off_policy_threshold | near if async | train(max_lag) | verl counts the version that sampled a response and the one that learns from it: one less here
trainer.v1.sampler.max_off_policy_strategy | near if async | train(stale) | drop: "cancel", which draws the same prompts again, where verl takes further ones; wait: "keep"
trainer.v1.sampler.{sync_refill_failed_groups,custom_sampler*} | refused unless null False {} | — | a stream takes whole groups in the data's order
trainer.v1.*.parameter_sync_step | near unless 1 | train(max_lag) | new weights are pushed after every update
trainer.v1.* | near | train(max_lag) | when a stream begins, and which GPU samples
trainer.checkpoint_callback_class | refused unless null | — | checkpoints are in the run folder
trainer.{fixed_eval,ref_update_freq} | refused unless null False 0 | — | the reference is frozen
trainer.balance_batch | near | — | rows are balanced over ranks at each pass, and stay in their mini-batch
trainer.{log_val_generations,log_generation_samples,device,nnodes,n_gpus_per_node,default_hdfs_dir,del_local_ckpt_after_load,esi_redundant_time,remove_previous_ckpt_in_save,ray_wait_register_center_timeout,use_v1,use_legacy_worker_impl,log_freq,rl_logging_board_dir,tensorboard_dir,profile_steps,profile_interval,controller_nsight_options.*,worker_nsight_options.*,npu_profile.*} | hardware | — | where it runs, and what is written
{reward_model,reward.reward_model}.rollout.{free_cache_engine,skip_tokenizer_init,enforce_eager,load_format,max_num_seqs,max_num_batched_tokens,enable_chunked_prefill,enable_prefix_caching,cudagraph_capture_sizes,data_parallel_size,expert_parallel_size,disable_log_stats} | hardware | — | how the reward model's server works
{reward_model,reward.reward_model}.rollout.{dtype,max_model_len} | near | rewards.RewardModel | the reward model's own; rounds otherwise
{reward_model,reward.reward_model}.{enable_resource_pool,nnodes,n_gpus_per_node,strategy,launch_reward_fn_async,use_reward_loop,use_dynamic_bsz,forward_max_token_len_per_gpu,ulysses_sequence_parallel_size,micro_batch_size_per_gpu,model.use_remove_padding,model.use_shm,model.use_fused_kernels,model.fsdp_config.*,model.trust_remote_code,nccl_timeout,megatron.*} | hardware | — | where and how the reward model runs
{reward_model,reward.reward_model}.reward_loop_source | refused unless null register | rewards.RewardModel | pass open(reward=…)
{reward_model,reward.reward_model}.{model.override_config*,rollout.engine_kwargs*} | refused unless null {} | rewards.RewardModel | the reward model as it is
{reward_model,reward.reward_model}.load_weight | refused unless null True | rewards.RewardModel | weights are always loaded
reward_model.{model.input_tokenizer,model.external_lib,max_length} | refused unless null | rewards.RewardModel | the reward model's own tokenizer and lengths
{reward,reward_model,custom_reward_function,reward_manager,sandbox_fusion}.* | exact | reward_from | the same names
{model_engine,model,engine} | hardware | — | transformers' models, in this process or by FSDP
skip.* | hardware if skip.rollout.enable | — | of skipping
distillation.enabled | exact | recipes.distill | with `use_task_rewards`, verl's default, the RL recipe with a teacher
distillation.teacher_models.*.model_path | exact if distillation.enabled | engines.local | the teacher, in this process; of several `teacher_model` is left out, as verl does
distillation.teacher_model.model_path | refused unless null | — | distillation.teacher_models.teacher_model.model_path
distillation.distillation_loss.loss_mode | exact if distillation.enabled | Divergence.estimator | forward_kl_topk is β=0 with top_k
distillation.distillation_loss.topk | exact if distillation.enabled | Divergence.top_k | of forward_kl_topk
distillation.distillation_loss.{use_task_rewards,distillation_loss_coef} | exact if distillation.enabled | grpo(distill_coef) | the coefficient counts with task rewards alone
distillation.distillation_loss.use_policy_gradient | exact if distillation.enabled | distill(policy_gradient) | without task rewards
distillation.distillation_loss.loss_max_clamp | exact if distillation.enabled | Divergence.loss_max_clamp
distillation.distillation_loss.log_prob_min_clamp | exact if distillation.enabled | Divergence.log_prob_min_clamp | of forward_kl_topk
distillation.distillation_loss.policy_loss_mode | refused unless vanilla | — | vanilla
distillation.distillation_loss.{clip_ratio,clip_ratio_low,clip_ratio_high} | refused unless 0.2 | — | 0.2
distillation.teacher_models.*.key | exact if distillation.enabled | distill(teacher) | of several: the data source whose rows learn from it
distillation.teacher_key | refused unless data_source | distill(teacher) | each row's teacher is that of its data source
distillation.* | hardware if distillation.enabled | — | where and how the teacher runs
rollout.{nnodes,n_gpus_per_node} | hardware | — | where the sampler is
sft_trainer | exact | recipes.sft | the command is one of verl's SFT trainer
data.messages_key | near | wb.rows(prompt) | of each answer its text and EOS are learned; in verl what the template writes behind it, too
data.multiturn.{messages_key,tools_key,enable_thinking_key} | alias | data.*
data.{multiturn.enable,response_key,prompt_dict_keys,response_dict_keys} | refused unless null True | wb.rows | of the older SFT trainer: write the column messages
data.{tools_key,enable_thinking_key,enable_thinking_default,chat_template} | refused unless null tools enable_thinking | engines.local(template_switches) | the model's chat template, and arguments of it that are the same for all rows
data.max_length | near | sft(max_tokens) | limits the prompt and what follows it, each alone; a longer one is refused | 1024, as in verl
data.ignore_input_ids_mismatch | near | — | the chat template reads a chat as a whole
trainer.seed | alias | data.seed
trainer.max_ckpt_to_keep | alias | trainer.max_actor_ckpt_to_keep
optim.{warmup_steps_ratio,lr_warmup_steps_ratio} | alias | actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
optim.lr_scheduler | alias | actor_rollout_ref.actor.optim.lr_scheduler_type
{optim.master_weights,optim.store_param_remainders,engine.backend_config.*} | near | — | rounds otherwise
optim.* | alias | actor_rollout_ref.actor.optim.*
optim | near unless fsdp | LocalSettings | chooses the defaults of another optimizer, which are not read: give the settings that matter
model.partial_pretrain | near | engines.local(path) | of the older SFT trainer, whose defaults (lr 1e-5, betas 0.9 and 0.95, cosine with a warm-up) are not read: give the settings that matter
model.fsdp_config.{cpu_offload,offload_params} | hardware | FsdpSettings.offload | where the weights are
model.fsdp_config.* | alias | actor_rollout_ref.actor.fsdp_config.*
model.* | alias | actor_rollout_ref.model.*
checkpoint.* | alias | actor_rollout_ref.actor.checkpoint.*
{ulysses_sequence_parallel_size,use_remove_padding} | alias | actor_rollout_ref.actor.*
{engine.distributed_strategy,engine.*_size,engine.activation_checkpointing,engine.enable_compile,model.strategy} | hardware | — | how ranks share the work
engine.* | alias | actor_rollout_ref.actor.{fsdp_config,megatron,veomni,torchtitan,engine}.*
{async_training,rollout,actor_rollout_ref.teacher,teacher,atropos}.* | refused | train(ahead) | of a recipe of verl's own
"""

DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae", "actor_rollout_ref.rollout.n": 1, "data.train_batch_size": 1024,
    "data.max_prompt_length": 512, "data.max_response_length": 512, "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl", "algorithm.use_kl_in_reward": False, "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.kl_ctrl.horizon": 10_000,
    "algorithm.kl_ctrl.target_kl": 0.1, "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": "all-linear", "trainer.total_epochs": 30,
}  # fmt: skip
"""verl's defaults that are not ours, of settings that change numbers: they hold where a command says nothing."""
SFT_DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 256, "data.max_length": 1024, "data.messages_key": "messages", "data.seed": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-3, "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": "all-linear", "trainer.total_epochs": 4,
}  # fmt: skip
"""The same of verl's SFT trainer, under the names of its RL trainer."""
ESTIMATORS = (
    "gae", "grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo",
    "rloo_vectorized", "opo", "gpg", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
"""verl's advantage estimators, all of which are here."""
DISTILLATION: Mapping[str, str] = {
    **{name: name for name in ("k1", "k2", "k3", "abs")},
    **{"kl": "k1", "mse": "k2", "low_var_kl": "k3", "forward_kl_topk": "full", "forward_kl_topk_tail": "full"},
}
"""verl's `loss_mode` of distillation → `Divergence.estimator`."""
_ALONE = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
GROUPED = tuple(name for name in ESTIMATORS if name not in _ALONE)
"""Estimators that compare a prompt's samples."""
ROOTS = ("reward", "reward_model", "custom_reward_function", "reward_manager", "sandbox_fusion")
"""First words of the keys that `reward_from` reads."""


class TableEntry(NamedTuple):
    """A line of the table of verl's settings: a key or pattern, its kind, its place here, a note and the default."""

    key: str
    kind: str
    place: str
    note: str
    default: str
    unless: tuple[str, ...] = ()
    only_if: str = ""


@functools.cache
def entries() -> tuple[TableEntry, ...]:
    """Return the lines of the table, in order; a line whose place has a `*` gives one entry for each key."""
    table = []
    for line in TABLE.strip().splitlines():
        pattern, kind, place, note, default = (*(cell.strip() for cell in line.split(" |")), "", "")[:5]
        head, _, only_if = kind.partition(" if ")
        word, _, values = head.partition(" unless ")
        for key in keys(pattern) if "*" in place else [pattern]:
            named = place.replace("*", key.rpartition(".")[2])
            table.append(TableEntry(key, word, named, note, default, tuple(values.split()), only_if))
    return tuple(table)


@functools.cache
def _by_key() -> dict[str, TableEntry]:
    """Map each key or pattern to the first entry that has it, in the table's order."""
    every: dict[str, TableEntry] = {}
    for entry in entries():
        for key in keys(entry.key):
            every.setdefault(key, entry)
    return every


@functools.lru_cache(4096)
def find(key: str) -> TableEntry | None:
    """Return the table's entry for a key, by its name before by a pattern; None for an unknown key."""
    fitting = (entry for one, entry in _by_key().items() if "*" in one and fnmatch.fnmatchcase(key, one))
    return _by_key().get(key) or next(fitting, None)


def known() -> list[str]:
    """List verl's keys that the table has a row for; keys that only a pattern with `*` covers are left out."""
    return [key for key in _by_key() if "*" not in key]


# --- the account --------------------------------------------------------------------------------

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"
_FILES = (f"{_TURNS}.tool_config_path", f"{_TURNS}.interaction_config_path")


_CHOICES: Mapping[str, Iterable[str]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    f"{_ACTOR}.policy_loss.loss_mode": F.POLICY_LOSSES,
    f"{_ACTOR}.loss_agg_mode": F.AGGREGATIONS,
    f"{_ACTOR}.optim.lr_scheduler_type": ("constant", "cosine"),
    "distillation.distillation_loss.loss_mode": DISTILLATION,
    "trainer.v1.trainer_mode": ("sync", "colocate_async", "separate_async"),
    "trainer.v1.sampler.max_off_policy_strategy": ("drop", "wait"),
}
"""Settings that name something there must be."""


class SettingRow(NamedTuple):
    """What one setting of a verl command becomes here, and why."""

    key: str
    value: str
    becomes: str
    """The place here: a setting of a class, an argument of a function; `—`: none."""
    kind: str
    """`exact`, `near`, `hardware` (changes no number), `refused`."""
    why: str


def is_sft(values: Mapping[str, Any]) -> bool:
    """Return whether the settings are of verl's SFT trainer."""
    return bool(values.get("sft_trainer"))


def defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return verl's defaults that hold for the trainer whose settings these are."""
    return SFT_DEFAULTS if is_sft(values) else DEFAULTS


def estimator(values: Mapping[str, Any]) -> str:
    """Return the advantage estimator that the settings name, or verl's default; `sft` for its SFT trainer."""
    if is_sft(values):
        return "sft"
    return str(values.get("algorithm.adv_estimator", DEFAULTS["algorithm.adv_estimator"]))


def has_critic(values: Mapping[str, Any]) -> bool:
    """Return whether the settings need a critic, which only the estimator `gae` does."""
    return estimator(values) == "gae"


def has_turns(values: Mapping[str, Any]) -> bool:
    """Return whether episodes have several turns: by a setting, by the loop's name, or by files of tools or users."""
    loop = str(values.get(f"{_ROLLOUT}.agent.default_agent_loop", ""))
    named = any(values.get(file) for file in _FILES)
    return loop.startswith("tool_agent") or bool(values.get(f"{_TURNS}.enable", named))


def longest(values: Mapping[str, Any], part: str) -> Any:
    """Return the longest `prompt` or `response` in tokens: the sampler's setting, or else the data's."""
    names = (f"{_ROLLOUT}.{part}_length", f"data.max_{part}_length", "data.max_length")
    return next((found for name in names if (found := values.get(name))), DEFAULTS[names[1]])


_SWITCHES: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    "critic": (has_critic, "there is no critic"),
    "multi_turn": (has_turns, "responses have one turn"),
    "gae": (lambda values: estimator(values) == "gae", "the estimator has none"),
    "gamma": (lambda values: estimator(values) in ("gae", "reinforce_plus_plus"), "the estimator has none"),
    "async": (lambda values: values.get("trainer.v1.trainer_mode", "sync") != "sync", "rollouts are in turn"),
    "decay": (
        lambda values: values.get(f"{_ACTOR}.optim.lr_scheduler_type", "constant") != "constant",
        "the rate is constant",
    ),
    "grpo": (lambda values: estimator(values) in ("grpo", "grpo_vectorized", "grpo_passk"), "the estimator has none"),
    "gdpo": (lambda values: estimator(values) == "gdpo", "the estimator is not gdpo"),
}


def canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under verl's present names: other spellings are replaced, a numeric `kl_penalty` becomes a
    coefficient."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        values[real(key)] = value
    if isinstance(coefficient := values.get("algorithm.kl_penalty"), int | float) and not isinstance(coefficient, bool):
        del values["algorithm.kl_penalty"]
        place = "algorithm.use_kl_in_reward" if has_critic(values) else f"{_ACTOR}.use_kl_loss"
        values.setdefault(place, True)
        values.setdefault("algorithm.kl_ctrl.kl_coef" if has_critic(values) else f"{_ACTOR}.kl_loss_coef", coefficient)
    if path := values.get("model.partial_pretrain"):
        values.setdefault("actor_rollout_ref.model.path", path)
    if values.get(f"{_ACTOR}.lora.enable"):
        values.setdefault("actor_rollout_ref.model.lora_rank", 16)
    return values


def real(key: str) -> str:
    """Return verl's present name in its RL trainer of a key that the table lists as an alias; any other key unchanged."""
    entry = find(key)
    if entry is None or entry.kind != "alias":
        return key
    names = [place.replace("*", key.removeprefix(entry.key[:-1])) for place in keys(entry.place)]
    return real(next((name for name in names if find(name)), names[0]))


def account(command: Command) -> list[SettingRow]:
    """Return a row for every setting of a command and for every word that is not a setting, then rows for settings that
    contradict each other."""
    values = canonical(command.settings)
    rows = [_row_for(key, value, values) for key, value in command.settings.items()]
    rows += [SettingRow(word, "", "—", "refused", why) for word, why in command.left_out.items()]
    lines = list(_reward(values))
    for number, row in enumerate(rows):  # a setting that is refused with others counts once, as refused
        named = [line for line in lines if line.why.startswith(f"{row.key.removeprefix('reward.')}=")]
        if named and row.kind != "refused":
            rows[number] = row._replace(becomes="—", kind="refused", why="; ".join(line.why for line in named))
        lines = [line for line in lines if line not in named]
    return [*rows, *_contradictions(values), *lines]


def _row_for(key: str, value: Any, values: Mapping[str, Any]) -> SettingRow:
    text, name = value if isinstance(value, str) else describe(value, 60), real(key)
    entry = find(name)
    if entry is None:
        return SettingRow(key, text, "—", "refused", f"unknown{_did_you_mean(key, known())}")
    spelled = f"{name}; " if name != key else ""
    if key == "algorithm.kl_penalty" and isinstance(value, int | float):
        why = "read as a coefficient; verl's kl_penalty is the kind: kl, low_var_kl"
        return SettingRow(key, text, "grpo(kl_coef)", "near", why)
    if entry.only_if and not _is_on(entry.only_if, values):
        reason = _SWITCHES[entry.only_if][1] if entry.only_if in _SWITCHES else f"{entry.only_if} is off"
        return SettingRow(key, text, "—", "exact", f"{spelled}without effect: {reason}")
    if _is_one_of(value, entry.unless):
        return SettingRow(key, text, entry.place, "exact", spelled + ("" if entry.kind == "near" else entry.note))
    if why := _cannot_be(key, name, value, entry) or _not_of_sft(name, value, values) or _unweighted(name, values):
        return SettingRow(key, text, "—", "refused", spelled + why)
    return SettingRow(key, text, entry.place, entry.kind, spelled + entry.note)


def _cannot_be(key: str, name: str, value: Any, entry: TableEntry) -> str:
    """Return why a known key cannot have this value; "" where it can."""
    if entry.kind in ("exact", "near") and isinstance(value, str) and "$" in value:
        unset = "what a shell command prints" if "$(" in value else "a variable that the text does not set"
        return f"{unset}: give the value"
    if name in _CHOICES and value is not None and value not in list(_CHOICES[name]):
        return f"there is none of this name{_did_you_mean(str(value), _CHOICES[name])}"
    if name == "data.train_batch_size" and value == 0:
        return "of fully asynchronous training, which takes ppo_mini_batch_size · require_batches prompts: give these"
    return _unread(key, value) if entry.place == "reward_from" else ""


def _not_of_sft(name: str, value: Any, values: Mapping[str, Any]) -> str:
    """Return why a command of the SFT trainer cannot have a setting; "" where it can, and for another command."""
    if is_sft(values) and name == "data.truncation" and value != "error":
        return "a longer row is refused, not cut: leave such rows out"
    alien = name.partition(".")[0] in ("algorithm", "critic", "distillation", *ROOTS)
    return "no setting of verl's SFT trainer" if is_sft(values) and alien else ""


def _unweighted(name: str, values: Mapping[str, Any]) -> str:
    """Return why the weights of the data files cannot be used, if `name` is their key; "" where they can, or the files
    are unknown."""
    weights, files = values.get("data.dataset_weights"), values.get("data.train_files")
    if name != "data.dataset_weights" or weights is None:
        return ""
    if not isinstance(weights, list) or not weights or not _are_numbers(*weights) or min(weights) <= 0:
        return "expected a list of numbers above 0, one for each of data.train_files"
    number = len(files) if isinstance(files, list) else int(bool(files))
    if number and number != len(weights):
        return f"{len(weights)} weights for {number} of data.train_files: name each file, in the order of its weight"
    if isinstance(limit := values.get("data.train_max_samples"), int) and limit > 0:
        return "a mixture has no first rows: leave data.train_max_samples out, or these weights"
    return ""


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    close = nearest(name, names, 0.8)
    return f": did you mean {close}?" if close else ""


def _is_on(switch: str, values: Mapping[str, Any]) -> bool:
    if switch in _SWITCHES:
        return _SWITCHES[switch][0](values)
    return bool(values.get(switch, DEFAULTS.get(switch, False)))


def _is_one_of(value: Any, words: tuple[str, ...]) -> bool:
    if ("+" in words and _are_numbers(value) and value > 0) or (isinstance(value, str) and value in words):
        return True
    return any(word == value and isinstance(word, bool) == isinstance(value, bool) for word in map(parsed, words))


def _unread(key: str, value: Any) -> str:
    """Return why `reward_from` cannot read a setting; "" where it can."""
    try:
        read_block({key: value})
    except SettingError as error:
        return str(error)
    return ""


def _reward(values: Mapping[str, Any]) -> Iterator[SettingRow]:
    """Yield table rows on reward settings that cannot be honoured together, or not on this machine."""
    block = {key: value for key, value in reward_block(values).items() if not _unread(key, value)}  # its row says it
    try:
        settings = read_block(block)
        lines = [*cannot(settings), *contradictions(settings)]
        manager = str(settings.get("reward_manager.name", "naive"))
        if settings.get("reward_manager.source", "register") == "register" and manager not in MANAGERS:
            lines.append(f"reward_manager.name={manager}: there is none of this name{_did_you_mean(manager, MANAGERS)}")
    except SettingError as error:
        lines = [str(error)]
    yield from (SettingRow("reward", "", "—", "refused", line) for line in lines)


def reward_block(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `reward_from` reads, by their dotted names."""
    block = {key: value for key, value in values.items() if key.split(".")[0] in ROOTS and value is not None}
    # verl's `gdpo` is `naive` that keeps the parts of a score, as every manager here does
    block = {key: "naive" if value == "gdpo" else value for key, value in block.items()}
    return {key: value for key, value in block.items() if (entry := find(key)) and entry.place == "reward_from"}


def _contradictions(values: Mapping[str, Any]) -> Iterator[SettingRow]:
    """Yield rows for settings that contradict each other, or that have another effect together than alone."""
    method, critic = estimator(values), values.get("critic.enable")
    loop = str(values.get(f"{_ROLLOUT}.agent.default_agent_loop", ""))
    named, in_reward = "algorithm.adv_estimator", values.get("algorithm.use_kl_in_reward")
    both, kls = f"{named} + critic.enable", f"{_ACTOR}.use_kl_loss + algorithm.use_kl_in_reward"
    cases: list[tuple[Any, ...]] = [
        (method == "gae" and critic is False, both, f"{method}, {critic}", "—", "refused",
         "gae needs a critic: leave critic.enable out, or take another estimator"),
        (method != "gae" and critic is True, both, f"{method}, {critic}", "—", "refused",
         f"{method} reads no values: the critic would be trained for nothing"),
        (values.get(f"{_ACTOR}.use_kl_loss") and in_reward, kls, "True, True", "both", "near",
         "the KL counts twice, in the loss and in the reward; verl warns"),
        (in_reward and values.get("algorithm.kl_penalty") == "full",
         "algorithm.kl_penalty + algorithm.use_kl_in_reward", "full, True", "—", "refused",
         "there is no such estimator, in verl neither"),
        (method in GROUPED and values.get(f"{_ROLLOUT}.n", 1) == 1 and _is_rewarded(values),
         f"{named} + {_ROLLOUT}.n", f"{method}, 1", "Advantage(singleton)", "near",
         'every group is one row: its advantage is its bare score, as in verl (`singleton="verl"`)'),
        (loop.startswith("tool_agent") and values.get(f"{_TURNS}.enable") is False,
         f"{_TURNS}.enable + {_ROLLOUT}.agent.default_agent_loop", f"False, {loop}", "ToolAgent", "near",
         "the loop's name counts, as in verl from 0.7 on: the tools run"),
        (values.get("algorithm.filter_groups.enable") and method in ("gae", "remax"),
         f"algorithm.filter_groups.enable + {named}", f"True, {method}", "—", "refused",
         f"dynamic sampling compares a prompt's samples, {method} does not"),
        (method == "grpo_vectorized" and values.get("algorithm.norm_adv_by_std_in_grpo") is False,
         f"{named} + algorithm.norm_adv_by_std_in_grpo", f"{method}, False", "Advantage", "near",
         "not divided by the deviation, as it says; verl's grpo_vectorized divides all the same"),
        *_numbers(values),
    ]  # fmt: skip
    yield from (SettingRow(*row) for holds, *row in cases if holds)


def _is_rewarded(values: Mapping[str, Any]) -> bool:
    """Return whether rewards reach the loss: not of distillation without task rewards."""
    rewarded = values.get("distillation.distillation_loss.use_task_rewards", True)
    return bool(rewarded or not values.get("distillation.enabled"))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield (whether it is so, *row) for numbers that do not fit each other, such as a mini-batch larger than the batch."""
    mini, batch = values.get(f"{_ACTOR}.ppo_mini_batch_size"), values.get("data.train_batch_size")
    batch = DEFAULTS["data.train_batch_size"] if batch is None else batch
    prompt, response = longest(values, "prompt"), longest(values, "response")
    rooms = (values.get(f"{_ROLLOUT}.{name}") for name in ("max_model_len", "engine_kwargs.vllm.max_model_len"))
    room = next((one for one in rooms if one is not None), None)
    key = f"{_ACTOR}.ppo_mini_batch_size + data.train_batch_size"
    why = "a mini-batch is a part of the batch; both count prompts"
    yield _are_numbers(mini, batch) and mini > batch > 0, key, f"{mini}, {batch}", "—", "refused", why
    key, why = f"{_ROLLOUT}.max_model_len + data.max_*_length", "verl's sampler cuts responses there"
    cut = _are_numbers(prompt, response, room) and prompt + response > room
    yield cut, key, f"{room}, {prompt} + {response}", "—", "refused", why
    for place in (_ACTOR, "critic"):
        two = [values.get(f"{place}.{name}") for name in ("grad_clip", "optim.clip_grad")]
        key, why = f"{place}.grad_clip + {place}.optim.clip_grad", "one number under two names: leave one out"
        yield None not in two and two[0] != two[1], key, f"{two[0]}, {two[1]}", "—", "refused", why
        both = all(values.get(f"{place}.ppo_micro_batch_size{end}") for end in ("", "_per_gpu"))
        yield both, f"{place}.ppo_micro_batch_size*", "both", "—", "refused", "one of the two: verl refuses both"


def _are_numbers(*found: Any) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in found)
