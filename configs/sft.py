# python sft.py configs/sft.py --init_from=out/20m --data=instructions.jsonl
#
# Instruction tuning of any model: three passes over the records, the middle of what people use.
# An adapter alone: --lora_rank=16. Look at what is trained first: --show=3.
epochs = 3
sequence_length = 1024
warmup_ratio = 0.05
eval_interval = 50
sample_interval = 50
save_interval = 100
