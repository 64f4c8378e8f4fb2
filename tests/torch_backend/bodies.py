"""The bodies of PyTorch's suite that cannot pass on this backend, with the reason of each: data, that test_suite.py checks."""

from __future__ import annotations

_BODIES = {
    "it needs a GPU": """
        test_1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager
        test_3_level_hierarchical_model_averager test_DistributedDataParallel test_DistributedDataParallel_SyncBatchNorm
        test_DistributedDataParallel_SyncBatchNorm_2D_Input test_DistributedDataParallel_SyncBatchNorm_Channels_Last
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
        test_DistributedDataParallel_SyncBatchNorm_No_Affine
        test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process test_DistributedDataParallel_SyncBatchNorm_half
        test_DistributedDataParallel_non_default_stream test_DistributedDataParallel_with_amp_and_grad_is_view
        test_DistributedSampler_padding test_all_gather_cuda test_all_gather_cuda_complex
        test_all_gather_into_cat_tensor_cuda test_all_gather_into_stack_tensor_cuda test_all_gather_v_cuda
        test_all_reduce_sum_cuda test_all_reduce_sum_cuda_async test_all_reduce_sum_cuda_complex test_all_to_all_cuda
        test_all_to_all_cuda_complex test_all_to_all_full_group_cuda test_all_to_all_group_cuda
        test_all_to_all_single_equal_split_cuda test_all_to_all_single_equal_split_cuda_complex
        test_all_to_all_single_equal_split_full_group_cuda test_all_to_all_single_equal_split_group_cuda
        test_all_to_all_single_unequal_split_cuda test_all_to_all_single_unequal_split_cuda_complex
        test_all_to_all_single_unequal_split_full_group_cuda test_all_to_all_single_unequal_split_group_cuda
        test_average_parameters test_barrier_cuda test_barrier_full_group_cuda test_barrier_group_cuda
        test_batch_isend_irecv_nccl test_batch_isend_irecv_no_rank_zero_nccl test_batch_isend_irecv_op_err
        test_batch_isend_irecv_ring_exchange_nccl test_batch_isend_irecv_self_nccl test_broadcast_cuda
        test_coalescing_manager test_coalescing_manager_async
        test_compute_bucket_assignment_by_size_sparse_error_with_logger
        test_compute_bucket_assignment_by_size_sparse_error_without_logger test_ddp_apply_optim_in_backward
        test_ddp_apply_optim_in_backward_grad_as_bucket_view_false test_ddp_apply_optim_in_backward_ignored_params
        test_ddp_broadcast_buffer test_ddp_broadcast_buffer_via_hook test_ddp_broadcast_buffers_deprecation_warning
        test_ddp_bucket_cap_mb_list test_ddp_buffer_hook_allreduce test_ddp_buffer_hook_allreduce_return_future
        test_ddp_build_debug_param_to_name_mapping test_ddp_build_debug_param_to_name_mapping_requires_grad
        test_ddp_comm_hook_logging test_ddp_compile_static_graph test_ddp_control_flow_different_across_ranks
        test_ddp_control_flow_same_across_ranks test_ddp_device test_ddp_device_mesh_initialization
        test_ddp_forward_backward_hook test_ddp_grad_div_uneven_inputs test_ddp_has_finalized test_ddp_hook_parity_allreduce
        test_ddp_hook_parity_allreduce_process_group test_ddp_hook_parity_post_localSGD test_ddp_hook_parity_powerSGD
        test_ddp_hook_pickling_powerSGD test_ddp_ignore_params_arg test_ddp_inference
        test_ddp_init_sync_buffers_with_forward_sync_buffers_false test_ddp_join_model_equivalence
        test_ddp_join_respects_forward_sync_buffers_false test_ddp_logging_data_gpu
        test_ddp_model_diff_num_params_across_ranks test_ddp_model_diff_shape_across_ranks
        test_ddp_multiple_nested_unused_params_err_ignore_params test_ddp_multiple_nested_unused_params_error
        test_ddp_namedtuple test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none test_ddp_native_mixed_precision_ignored_params
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none test_ddp_new_tensor_in_fwd
        test_ddp_new_tensor_in_fwd_static_graph test_ddp_profiling_autograd_profiler test_ddp_profiling_torch_profiler
        test_ddp_python_error_logged test_ddp_remove_autograd_hooks test_ddp_returns_tensor_with_no_grad
        test_ddp_shared_grad_acc_unused_params test_ddp_sink_noclone test_ddp_static_graph_nested_types
        test_ddp_sync_bn_training_vs_eval test_ddp_sync_module_states test_ddp_uneven_input_exception
        test_ddp_uneven_input_join_disable test_ddp_uneven_inputs test_ddp_uneven_inputs_stop_iteration_sync_bn
        test_ddp_unused_params_rebuild_buckets_exception test_ddp_zero_output_features test_detect_ddp_is_actually_static
        test_different_graph_across_ranks test_gather_cuda test_get_data_parallel_params test_invalid_static_graph
        test_nccl_backend_bool_allgather test_nccl_backend_bool_allreduce test_nccl_backend_bool_broadcast
        test_nccl_backend_bool_reduce test_nccl_high_priority_stream test_new_subgroups_by_enumeration
        test_output_unused_in_loss_dict_module test_output_unused_in_loss_tuple_module test_periodic_model_averager
        test_periodic_model_averager_param_group test_post_localSGD_optimizer_parity
        test_post_localSGD_optimizer_parity_grad_is_view test_post_localSGD_optimizer_parity_with_hierarchical_sgd
        test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view test_post_localSGD_optimizer_step_reload
        test_reduce_scatter_tensor_cuda test_reduce_scatter_v_cuda test_reduce_sum_cuda test_reduce_sum_cuda_twice
        test_scatter_cuda test_scatter_cuda_complex test_send_recv_nccl test_send_recv_nccl_autograd_profiler
        test_send_recv_nccl_torch_profiler test_skip_all_reduce_unused_parameters test_sparse_all_reduce_sum_cuda
        test_stateless_api_with_ddp test_static_graph_multi_forward test_sync_bn_logged
        test_undefined_grad_parity_unused_parameters test_verify_model_across_rank_with_logger
        test_verify_model_across_rank_without_logger
    """,
    "it makes a group of NCCL": """
        test_batch_isend_irecv_mixed_backend_err test_monitored_barrier_allreduce_hang
        test_monitored_barrier_allreduce_hang_wait_all_ranks
    """,
    "it expects that the backend is NCCL": """
        test_ddp_profiling_execution_trace
    """,
    "it needs torchvision and a GPU": """
        test_SyncBatchNorm_process_group
    """,
    "torch.distributed.monitored_barrier takes no other backend than gloo; test_groups.py calls the method of the group": """
        test_monitored_barrier_failure_order test_monitored_barrier_gloo test_monitored_barrier_gloo_subgroup
        test_monitored_barrier_wait_all_ranks
    """,
}

REASONS = {name: reason for reason, names in _BODIES.items() for name in names.split()}
"""Why a body cannot pass, by its name. Each other body passes, on as many ranks as it needs."""

RANKS = {"test_new_subgroups_with_group_param": 4}
"""How many ranks a body needs, if no decorator of the suite says so."""
