"""Vision: image classification, detection and segmentation with MambaVision."""

TASKS = {
    "vision": "classify.VisionTask",
    "detection": "detect.DetectionTask",
    "segmentation": "segment.SegmentationTask",
}
EXTRA = "vision"
