# torchrun --nproc-per-node=8 train.py configs/124m.py --data=my.jsonl --tokenizer=gpt2
#
# GPT-2's size and context, on 2.5B tokens (20 for each parameter;
# GPT-2-class results take 10B: --tokens=10B).
params = "124M"
sequence_length = 1024
global_batch_size = 512
tokens = "2.5B"
eval_tokens = "2M"
