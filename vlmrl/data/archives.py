"""Unpacks the tar archives of datasets: regular files alone, since a link in one may lead to any file of this machine."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from datasets.utils.extract import Extractor, TarExtractor


class RegularTar(TarExtractor):
    """Unpacks tar archives without links: ``datasets`` checks where a link leads before the links on its way are unpacked."""

    @staticmethod
    def extract(input_path: Path | str, output_path: Path | str) -> None:
        """Unpack an archive. Raises ValueError if it holds anything but files, folders and second names of its own files."""
        folder = Path(output_path)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(input_path) as archive:
                members = TarExtractor.safemembers(_regular(archive, input_path), folder)
                archive.extractall(folder, members=members)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # what is in it would count as all of the archive
            raise


def _regular(archive: tarfile.TarFile, path: Path | str) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        # `tarfile` makes a hard link from the archive's root, while `safemembers` checks it from the link's folder.
        to = Path(member.linkname)
        is_own = member.islnk() and not to.is_absolute() and ".." not in to.parts
        if not (member.isfile() or member.isdir() or is_own):
            raise ValueError(
                f"the dataset's archive {path} must hold regular files and folders alone, but {member.name[:200]!r} in it is a link, "
                "a pipe or a device: unpack it yourself, and set data.path to the folder."
            )
        yield member


def refuse_links() -> None:
    """Let ``datasets`` unpack tar archives with :class:`RegularTar`, in this whole process."""
    Extractor.extractors = {**Extractor.extractors, "tar": RegularTar}
