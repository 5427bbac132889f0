# torchrun --nproc-per-node=8 train.py configs/20m.py
#
# 20M parameters, 20 tokens each: minutes on a GPU, an hour or so on none of them. Works as it stands
# (the built-in corpus when no data is given); for a model worth keeping give it your text: --data=my.jsonl
params = "20M"
sequence_length = 512
global_batch_size = 128
tokens = "400M"
eval_tokens = "1M"
