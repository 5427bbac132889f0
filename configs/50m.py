# torchrun --nproc-per-node=8 train.py configs/50m.py --data=my.jsonl
#
# 50M parameters, 20 tokens each.
params = "50M"
sequence_length = 1024
global_batch_size = 128
tokens = "1B"
eval_tokens = "1M"
