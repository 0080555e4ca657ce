// What the API sends, as far as the page reads it.

export type JobState = "queued" | "running" | "done" | "failed" | "cancelled";
export type Operation = "image_generation" | "image_transform" | "image_inpaint" | "train";

export interface LoraChoice {
  name?: string;
  hash?: string;
  strength?: number;
  te?: number | null;
  unet?: number | null;
}

/** Fields of an image job; what is missing takes the model's own value. */
export interface ImageSettings {
  prompt: string;
  negative_prompt?: string;
  steps?: number;
  guidance?: number;
  seed?: number;
  width?: number;
  height?: number;
  sampler?: string;
  schedule?: string;
  clip_skip?: number;
  count?: number;
  strength?: number;
  feather?: number;
  loras?: LoraChoice[];
}

export interface ImageRequest extends ImageSettings {
  operation?: Operation;
  model?: string;
  priority?: number;
  preview_every?: number;
  image?: string;
  mask_image?: string;
  on_mismatch?: "error" | "warn";
}

export interface ResultImage {
  index: number;
  seed: number;
  settings: ImageSettings;
  width: number;
  height: number;
  file: string;
  url: string;
}

export interface ResultLora {
  name: string;
  te: number;
  unet: number;
  modules: number;
  modules_in_file: number;
  modules_in_model: number;
  apply_seconds: number;
  sha256: string;
  autov2: string;
  autov3: string | null;
}

export interface JobResult {
  images: ResultImage[];
  loras?: ResultLora[];
  warnings?: string[];
  seconds?: number;
  model?: { name: string };
  [name: string]: any;
}

export interface Job {
  id: string;
  operation: Operation;
  model: string;
  state: JobState;
  priority: number;
  position: number | null;
  attempts: number;
  cancel_requested: boolean;
  created: number;
  started: number | null;
  finished: number | null;
  settings: ImageSettings & Record<string, any>;
  warnings: string[];
  result: JobResult | null;
  error: { code: string; message: string } | null;
  urls: { self: string; events: string; stream: string };
}

/** One event of a job's stream; the fields depend on its type. */
export interface JobEvent {
  type: string;
  job: string;
  event: number;
  step?: number;
  total?: number;
  percent?: number;
  eta?: number;
  /** a preview or sample, PNG in base64 */
  image?: string;
  [name: string]: any;
}

/** Where a running job is. */
export interface Progress {
  step: number;
  total: number;
  percent: number;
  eta: number | null;
  /** data: address of the newest preview */
  preview: string | null;
  /** loading, preparing, running, ... */
  phase: string;
}

export interface Lora {
  id: string;
  name: string;
  path: string;
  size: number;
  modified: number;
  alias: string | null;
  title: string | null;
  tensors: number;
  algorithms: string[];
  ranks: number[];
  dtypes: string[];
  dialects: string[];
  modules: number;
  base: string | null;
  confidence: number;
  triggers: { source: string; words: string[] }[];
  description: string | null;
  notes: string | null;
  preferred_strength: number | null;
  negative_text: string | null;
  preview: string | null;
  error: string | null;
  hashes: { sha256: string; autov1: string | null; autov2: string; autov3: string | null } | null;
  health: string[];
  checked: boolean;
  /** whether this worker may delete it */
  removable: boolean;
}

export interface Model {
  name: string;
  default: boolean;
  base?: string | null;
  /** what a request gets that leaves it open; null where the base does not decide it */
  defaults?: { size: number; steps: number; guidance: number } | null;
}

export interface Capabilities {
  version: string;
  operations: Operation[];
  models: Model[];
  samplers: string[];
  schedules: string[];
  bases: string[];
  dialects: string[];
  features: string[];
  limits: {
    queue: number;
    body_bytes: number;
    lora_bytes: number;
    image_pixels: number;
    images_per_job: number;
    job_seconds: number;
    keep_hours: number;
  };
}

/** What a picture says of how it was made. */
export interface PictureSettings {
  settings: Partial<ImageSettings> & Record<string, any>;
  /** id: null where the library does not have it */
  loras: { reference: string; id: string | null; name: string }[];
  model: { name?: string };
  warnings: string[];
}
