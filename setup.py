"""The compiled part of the package; everything else is in pyproject.toml.

Optional: without a C compiler the package installs and works, slower (kvstore/model/checksum.py).
"""

import sysconfig

from setuptools import Extension, setup

LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # Python without its lock has no stable interface yet

setup(
    ext_modules=[
        Extension(
            "kvstore.model._checksum",
            ["kvstore/model/_checksum.c"],
            extra_compile_args=["-O3"],
            py_limited_api=LIMITED,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
