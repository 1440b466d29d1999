"""Examples at the end of each command's help."""

EXAMPLES = {
    "train": (
        "longspan train --data my-texts/ --out runs/mine --preset tiny",
        "longspan train --data reviews.csv --text-field review --label-field stars --out runs/reviews",
        "longspan train --init runs/mine --data more.jsonl --context 16384 --out runs/longer",
        "longspan train --out runs/mine  # resume",
    ),
    "eval": (
        "longspan eval --model runs/mine --data other-texts/ --out runs/mine-eval.json",
        "longspan eval --model runs/reviews --data test.csv",
        "longspan eval --task mqar,needle --mechanisms linear,delta --length 512",
    ),
    "predict": (
        "longspan predict --model runs/reviews --data new.csv --out predicted.csv",
        "longspan predict --model runs/photos --data 'photos/*.png' > predicted.csv",
    ),
    "report": ("longspan report runs/mine", "longspan report runs/mine runs/other --out compared.html"),
    "generate": (
        "longspan generate --model runs/mine --prompt 'Once upon a time' --max-tokens 400",
        "longspan generate --model runs/mine --prompt-file book.txt --state book.safetensors",
        "longspan generate --model runs/mine --resume book.safetensors --seed 7",
    ),
    "serve": (
        "longspan serve --model runs/mine",
        "longspan serve --model runs/mine --slots 32 --cache 2GiB --cache-dir cache --state-dir states",
        "longspan serve --model runs/mine --host 0.0.0.0 --api-key-file keys.txt --quantize int8",
    ),
    "run": ("longspan run train.py --epochs 3", "longspan run --device cpu --faithful train.py"),
    "linearize": (
        "longspan linearize --model SmolLM2-135M --data books/ --out runs/smol --minutes 10",
        "longspan linearize --model model.gguf --data books/ --out runs/hybrid --keep-layers 0,9,19,29",
    ),
    "convert": ("longspan convert model.pt converted/ --from performer-pytorch --config arguments.json",),
    "estimate": (
        "longspan estimate --gpus 64 --context 1M --preset base",
        "longspan estimate --gpus 8 --mesh fsdp=4,cp=2 --context 256k --json",
    ),
    "export": ("longspan export runs/mine exported/",),
    "bench": (
        "longspan bench --mechanisms linear,local --lengths 4096,65536",
        "longspan bench generate --device cuda --dtype bfloat16",
        "longspan bench all --out runs/bench --minutes 30",
    ),
    "bench host": ("longspan bench host --lengths 256,1024",),
    "bench quality": ("longspan bench quality --data book.txt --candidates softmax,local+linear --seconds 60",),
    "bench recall": ("longspan bench recall --tasks mqar,parity --mechanisms linear,delta-head --length 256",),
    "bench sweep": (
        "longspan bench sweep --minutes 8",
        "longspan bench sweep --mechanisms local,performer --head-dims 64,128 --minutes 9",
    ),
    "bench serve": (
        "longspan bench serve --model runs/mine",
        "longspan bench serve --model runs/mine --slots 256 --requests 10000 --device cuda",
    ),
    "info": (
        "longspan info",
        "longspan info --model runs/mine",
        "longspan info runs/mine --why --batch 8 --length 4096",
        "longspan info --why --mechanisms performer --options '{\"num_features\": 512}' --head-dim 128 --device cuda",
    ),
}


def examples(command: str) -> str:
    """Return the examples of a command as the last lines of its help."""
    return "\n".join(["examples:", *(f"  {line}" for line in EXAMPLES[command])])
