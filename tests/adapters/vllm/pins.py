"""What each file of a released vLLM must hash to (SHA-256)."""

from __future__ import annotations

PINS: dict[str, dict[str, str]] = {
    "0.26.0": {
        "vllm/config/model.py": (
            "7d52e060db54067a21591882bd6e3c2dd2486ac9041dde1117f97023e71bf89f"
        ),
        "vllm/device_allocator/__init__.py": (
            "16f72ae5d5f29365e203dfa93917955c02675a00ab06d4630b6e273728e08f7c"
        ),
        "vllm/device_allocator/cumem.py": (
            "109f56d2e297d22078424e6801435bb7164f1beb79b147e3b0cb4e0155f20d2d"
        ),
        "vllm/device_allocator/sleep_mode_backend.py": (
            "f1e3c7e26aed142156c9966d6c5ac84f97ad463da4b775526866965ee3f0ea3b"
        ),
        "vllm/engine/arg_utils.py": (
            "e46d992fb2553f7ecd71d9b64459ecbc7daa740305b19e862493389d1b68d11a"
        ),
        "vllm/entrypoints/llm.py": (
            "a0b80b83771e36c4e8cbe3451952fc38bd93db60a1186e6ff4da4b4035618b7d"
        ),
        "vllm/entrypoints/serve/dev/cache/api_router.py": (
            "ba0e9be90c4fe8f42526c163d073ee5889492e4cdd8231599901d0b3aab669ce"
        ),
        "vllm/entrypoints/serve/dev/rpc/api_router.py": (
            "02b3ac71867b333548b15cb5d8382877d587b211c4ef80fdd881712ab523d107"
        ),
        "vllm/entrypoints/serve/dev/sleep/api_router.py": (
            "1f25fb129db72c6e0e2bf194905c53d6bc7c53ad6ec95b2ef07c6829b4509454"
        ),
        "vllm/envs.py": ("e078b0acb8e658faa6a8144d13a9036e2a82af40b348f419489a2607247cd936"),
        "vllm/plugins/__init__.py": (
            "fb6e6ee432c5a4ae207aaffe4b546aca9381f56ee8498b0a3e0d9af2d289d023"
        ),
        "vllm/utils/torch_utils.py": (
            "4b439b2ba954e5b4d9d4f86f9a26135ab995ba7d71f74a4d9f1763168921b406"
        ),
        "vllm/v1/engine/core.py": (
            "3ae1381a6af841e21058c825702382dc66faae45c950ac5acb8495d2d3d05aad"
        ),
        "vllm/v1/executor/abstract.py": (
            "419002195d13cf050c3ea9705d18a12456c890c27c470a1efadce7de27ded0b1"
        ),
        "vllm/v1/executor/multiproc_executor.py": (
            "fb279ff0e0a08681aa0078037d559351006b5453ecd1b1ea12277995925f3312"
        ),
        "vllm/v1/serial_utils.py": (
            "d75c17a098231b2398cbdb7da6f9983e5b9229c0ba138b2874934d45fafd1f28"
        ),
        "vllm/v1/worker/gpu_model_runner.py": (
            "81b7627fbe81f7aaa2f77b4bf085faa353c69d03662ebfe369536a9773bb70d0"
        ),
        "vllm/v1/worker/gpu_worker.py": (
            "28ac3f85aca3f68f18ac51cb5915e4d7ebe316c4ff3c021f1c2c5d3b90daca56"
        ),
        "vllm/v1/worker/worker_base.py": (
            "7da44338c2645ebf03d23394e452b31a8e3da1011fd1b42fcfcccfe99551b3fe"
        ),
    },
    "0.33.0": {
        "vllm/compilation/cudagraph_pool.py": (
            "bdfb5b3d3a12c8115f78d7ed87f3dc9356becf9fbac2d83a314fd35f4ba3ec40"
        ),
        "vllm/config/model.py": (
            "e35090bc42befb81217dbb42c1508531b5402a872f5b8a12f36ba772c604d654"
        ),
        "vllm/config/vllm.py": ("892088ef8dc5c7fa9d50cdf083dd776fd45e8d148d53b4a3279b2e79abeab0ca"),
        "vllm/device_allocator/__init__.py": (
            "2183bfb47de32e06cbd4b7db1608fb7c8be1540e7352ee7c874d6d90e79d82cd"
        ),
        "vllm/device_allocator/alloc_conf.py": (
            "ef11ab3c5cb1fc66c707d94edd11bb1be2ede84d80bcf690ff7981da5e2881bd"
        ),
        "vllm/device_allocator/cumem.py": (
            "ed72430af1de6dfb7cc0998a3757585c6da8846facc2a7e8f347241a1141fef3"
        ),
        "vllm/device_allocator/sleep_mode_backend.py": (
            "4c90c6aa44b50dc5bbdd6b09d1e6a91d56d3481a109a8d7f8cc351927401196b"
        ),
        "vllm/engine/arg_utils.py": (
            "f97af20917395ae717976f6022a78dd996a63c564a31db98567dd979cf0e2aa8"
        ),
        "vllm/entrypoints/llm.py": (
            "cbc2be337cfee11c2bb426e4645cd600487d418606de74652daad81657100172"
        ),
        "vllm/entrypoints/serve/dev/cache/api_router.py": (
            "8f773fff7402bfbf5a8d9290bed47a7f44cde7d248592d41264625a3f7a7e51a"
        ),
        "vllm/entrypoints/serve/dev/rpc/api_router.py": (
            "713774687e0132ad62421c3620d5fa799f59418bbbf3597255645f811d72e902"
        ),
        "vllm/entrypoints/serve/dev/sleep/api_router.py": (
            "2aa5c01c8a19f1ef6c662e42cc26ac77f98d0940275dab4116f58204041b298a"
        ),
        "vllm/envs.py": ("a9f665c49da1d8852c19a192f5d5848f0e38f4f56c76b5fafe0c17398945b357"),
        "vllm/plugins/__init__.py": (
            "06942d64e526c2c7407265e1903d625c4d2118d8d7fc39c616b1cc6aa6fc2c8f"
        ),
        "vllm/v1/engine/core.py": (
            "d02d32df5d15f0a8b8ffc731ed4bc6f7fcb68b8a9273ec5e4c5d1ab4bd7d7e01"
        ),
        "vllm/v1/executor/abstract.py": (
            "9980c6ed61c3705fc7567b898e99f23c12c56a718cbf9f7f071371463260313f"
        ),
        "vllm/v1/executor/multiproc_executor.py": (
            "d1de4acfa99d63325c7449e61aef24dbe96c16291ef7347836695faee8faa3fc"
        ),
        "vllm/v1/serial_utils.py": (
            "8a99e91c9ba9b34288b03e19f7f2afc6f884b5864d432a7aaf6e2664d2105927"
        ),
        "vllm/v1/worker/gpu_worker.py": (
            "e46a2659842b5b0238ca5d13ecb4a2dcff91f028493a7117d666edb0785a742c"
        ),
        "vllm/v1/worker/lora_model_runner_mixin.py": (
            "35b7614cd7028ee60772568040949058af4c279b4cb4d13fa29ef0ba039a4009"
        ),
        "vllm/v1/worker/worker_base.py": (
            "56bd163cc79f4221e391837aac138b8f4f644cf6d6ec1e585056427ab759e1cc"
        ),
        "vllm/v1/worker/workspace.py": (
            "bcf9ea207279c38a476be4ca74137a9d3a973f1fd97d85639a383357f881eb06"
        ),
    },
}
