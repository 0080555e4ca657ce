// Types of the whole page, global, so that modules need no import. First the parts of API responses that the page reads.

type JobState = "queued" | "running" | "done" | "failed" | "cancelled";
type Operation = "image_generation" | "image_transform" | "image_inpaint" | "train";

interface LoraChoice {
  name?: string;
  hash?: string;
  strength?: number;
  te?: number | null;
  unet?: number | null;
}

/** Fields of an image job; missing ones take the model's defaults. */
interface ImageSettings {
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

interface ImageRequest extends ImageSettings {
  operation?: Operation;
  model?: string;
  priority?: number;
  preview_every?: number;
  image?: string;
  mask_image?: string;
  on_mismatch?: "error" | "warn";
  /** false: the images expire with their job */
  gallery?: boolean;
}

interface ResultImage {
  index: number;
  seed: number;
  settings: ImageSettings;
  /** the axes of a sheet */
  grid?: string[];
  width: number;
  height: number;
  file: string;
  url: string;
  /** its id in the gallery, if the worker has one */
  gallery?: string;
}

/** An image of the gallery. */
interface GalleryRow {
  id: string;
  name: string;
  path: string;
  created: number;
  width: number;
  height: number;
  bytes: number;
  prompt: string;
  negative_prompt: string;
  model: string;
  seed: string;
  loras: string[];
  starred: boolean;
  /** their ids */
  albums: string[];
  /** null: it was imported, or found in the folder */
  job: string | null;
  place: number;
  trashed: boolean;
  url: string;
  thumbnail: string;
}

interface ResultLora {
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

interface JobResult {
  images: ResultImage[];
  loras?: ResultLora[];
  warnings?: string[];
  seconds?: number;
  model?: { name: string };
  [name: string]: any;
}

interface Job {
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
  /** of a train job: its dataset, and the first job of its run */
  dataset?: string;
  run?: string;
}

/** One event of a job's stream; the fields depend on its type. */
interface JobEvent {
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

/** Progress of a running job. */
interface Progress {
  step: number;
  total: number;
  percent: number;
  eta: number | null;
  /** data: address of the newest preview */
  preview: string | null;
  /** loading, preparing, running, ... */
  phase: string;
}

interface Lora {
  id: string;
  name: string;
  /** the name, with invisible characters escaped */
  display_name: string;
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
  /** how its sample images were made, with and without it */
  sample: { prompt: string; seed: number; model: string; strength: number; width: number; height: number; version: string } | null;
  error: string | null;
  hashes: { sha256: string; autov1: string | null; autov2: string; autov3: string | null } | null;
  health: string[];
  checked: boolean;
  /** whether this worker may delete it */
  removable: boolean;
}

/** One LoRA with the metadata of its file. */
interface LoraDetails extends Lora {
  metadata: Record<string, unknown>;
}

/** A tensor, or the tensors of a module, that a model has no place for. */
interface Finding {
  module: string;
  keys: string[];
  reason: string;
  nearest?: string | null;
  expected?: number[] | null;
}

interface Placement {
  keys: string[];
  component: string;
  tensor: string;
  rows: [first: number, count: number] | null;
  shape: number[];
  algorithm: string;
}

/** Whether a LoRA fits a model. */
interface Verdict extends Partial<Record<"unplaced" | "mismatched" | "orphans" | "duplicates" | "unsupported", Finding[]>> {
  ok: boolean;
  error?: string | null;
  tensors: number;
  placed: number;
  nonfinite: string[];
  warnings: string[];
  placements: Placement[];
}

/** The trainer's report on a run that has not started. */
interface CheckReport {
  ok: boolean;
  problems?: string[];
  warnings?: string[];
  estimate?: { total_bytes: number; seconds: number; steps: number; choices?: string[] };
  device?: { total_bytes: number; name: string };
  dataset?: { steps_per_epoch: number; buckets: Record<string, number> };
}

interface Model {
  name: string;
  default: boolean;
  base?: string | null;
  /** of requests that leave them open; null if the base has none */
  defaults?: { size: number; steps: number; guidance: number } | null;
  /** images at most that it sees beside a prompt */
  references?: number;
}

interface Capabilities {
  version: string;
  operations: Operation[];
  models: Model[];
  samplers: string[];
  schedules: string[];
  bases: string[];
  dialects: string[];
  features: string[];
  upscalers: { name: string; label: string; latent: boolean }[];
  axes: string[];
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

/** A device that runs jobs. */
interface Device {
  name: string;
  /** as torch names it; null until its process reports it */
  device: string | null;
  status: "starting" | "loading" | "ready" | "failed" | "stopping";
  /** why it is not ready */
  reason: string;
  /** the id of the job that it runs */
  job: string | null;
  /** in its memory */
  models: string[];
  /** in its memory, by the references of jobs */
  loras: string[];
  role: "mixed" | "training" | "images";
  /** its machine, of several */
  node: string;
}

/** A machine of a cluster. */
interface ClusterNode {
  name: string;
  alive: boolean;
  cpus: number;
  gpus: number;
}

/** The queue with its devices. */
interface Queue {
  waiting: (Job & { reason: string })[];
  devices: Device[];
  nodes: ClusterNode[];
}

/** Settings read from an image file. */
interface ImageMetadata {
  settings: Partial<ImageSettings> & Record<string, any>;
  /** id: null if it is not in the library */
  loras: { reference: string; id: string | null; name: string }[];
  model: { name?: string };
  warnings: string[];
}

// The page's own.

interface Store<T> {
  get: () => T;
  set: (patch: Partial<T> | ((state: T) => Partial<T>)) => void;
  subscribe: (listener: () => void) => () => void;
}

interface AppState {
  /** locked: the worker requires a token */
  session: "opening" | "locked" | "open";
  tokenRequired: boolean;
  /** whether the last call reached the worker */
  online: boolean;
  /** why the worker is not ready */
  notReady: string | null;
  capabilities: Capabilities | null;
  /** null until loaded */
  loras: Lora[] | null;
  /** running and waiting jobs, in order; null until loaded */
  active: Job[] | null;
  /** whether the queue is paused */
  paused: boolean;
  /** jobs that ended, newest first; null until loaded */
  ended: Job[] | null;
  /** start of the next page of them */
  endedNext: number | null;
  /** of running jobs, by id */
  progress: Record<string, Progress>;
}

interface Shortcut {
  keys: string;
  /** shown in the sheet */
  label: string;
  /** its heading in the sheet */
  group: string;
  run: (event: KeyboardEvent) => void;
  /** text fields have the same shortcut, and keep it */
  textOwn: boolean | undefined;
}

interface CallOptions {
  method?: string;
  /** sent as the body */
  json?: any;
  /** sent unchanged */
  body?: BodyInit;
  headers?: Record<string, string>;
  query?: Record<string, string | number | boolean | null | undefined | string[]>;
  signal?: AbortSignal;
}

/** A LoRA in a prompt. */
interface Tag {
  start: number;
  end: number;
  /** a name, an id or a hash */
  name: string;
  /** strength of the text encoders */
  te: number;
  /** strength of the denoiser */
  unet: number;
}

/** An image of a job that is done. */
interface GalleryImage {
  /** without images in its result if it has expired */
  job: Job;
  image: ResultImage;
  row?: GalleryRow;
}

/** A form: the settings of the next image. */
interface Draft extends Omit<ImageSettings, "loras"> {
  negative_prompt: string;
  model?: string;
  /** whether the next image has the same seed */
  locked: boolean;
  /** names, as JSON */
  styles?: string;
  /** ids of uploads, as JSON */
  references?: string;
  /** axes of a sheet, as the API spells them */
  across?: string;
  down?: string;
  upscaler?: string;
  upscale_scale?: number;
  upscale_strength?: number;
  upscale_steps?: number;
  outpaint_left?: number;
  outpaint_top?: number;
  outpaint_right?: number;
  outpaint_bottom?: number;
}

/** A named text for prompts. */
interface Style {
  name: string;
  prompt: string;
  negative_prompt: string;
}

interface DraftStore extends Store<Draft> {
  /** the fields that are set, by the names of the API */
  fields: () => Record<string, any>;
  /** take the settings of an image; missing ones become the model's defaults */
  take: (settings: Record<string, any>) => void;
  /** write it into the address now */
  remember: () => void;
}

interface Point {
  x: number;
  y: number;
}

interface Rect extends Point {
  width: number;
  height: number;
}

/** The previous pixels of a rectangle of a mask. */
interface Change {
  rect: Rect;
  pixels: ImageData;
}

/** The image that is edited. */
interface EditSource {
  /** upright, on white: shown and sent */
  canvas: HTMLCanvasElement;
  /** the original image, if parts of it are transparent */
  holes: ImageBitmap | null;
  /** the canvas as PNG */
  blob: Blob;
  /** of the blob */
  url: string;
  /** its id on the worker */
  upload: Promise<string> | null;
  width: number;
  height: number;
}

interface EditState {
  source: EditSource | null;
  mask: import("../views/edit/mask.js").Mask | null;
  /** number of changes of the mask */
  version: number;
  /** the source in the address */
  from: Record<string, string>;
  tool: "brush" | "eraser" | "hand";
  /** of the brush, in pixels of the image */
  size: number;
  /** whether the mask is not shown */
  hidden: boolean;
  /** the image point in the middle; null: fit to window */
  camera: (Point & { zoom: number }) | null;
  /** size of the frame */
  box: { width: number; height: number };
  /** edits of this source, newest first */
  jobs: string[];
  /** the job that the address named */
  opened: Job | null;
  /** on a narrow window */
  shown: "image" | "result";
}

// Props and options that are longer than a line.

/** One connection to the events of a job, and its readers. */
interface JobStream {
  events: JobEvent[];
  listeners: Set<(event: JobEvent) => void>;
  failures: Set<(e: any) => void>;
  stop: AbortController;
}

/** lib/sse.js */
interface FollowStreamOptions {
  onEvent: (event: ServerEvent) => void;
  isFinal: (event: ServerEvent) => boolean;
  signal: AbortSignal;
}

/** ui/beforeafter.js */
interface BeforeAfterProps {
  before: string;
  after: string;
  beforeLabel: string;
  afterLabel: string;
  width: number;
  height: number;
  alt: string;
}

/** ui/button.js */
interface ButtonProps {
  children?: any;
  icon?: any;
  label?: string;
  kind?: "primary" | "plain" | "quiet" | "danger";
  size?: "small" | "large";
  href?: string;
  class?: string;
  disabled?: boolean;
  busy?: boolean;
  [attribute: string]: any;
}

/** ui/dialog.js */
interface DialogProps {
  title: string;
  onClose: () => void;
  children?: any;
  actions?: any;
  wide?: boolean;
}

/** ui/dialog.js */
interface ConfirmProps {
  title: string;
  text: string;
  confirm: string;
  onConfirm: () => void;
  onClose: () => void;
}

/** ui/dropzone.js */
interface DropZoneProps {
  onFiles: (files: File[]) => void;
  accept: string;
  label: string;
  hint?: string;
  multiple?: boolean;
  icon?: any;
  compact?: boolean;
}

/** ui/field.js */
interface SearchProps {
  value: string;
  onChange: (value: string) => void;
  /** of the input */
  [attribute: string]: any;
}

/** ui/field.js */
interface SelectProps {
  label: string;
  value: string;
  options: (string | [value: string, label: string])[] | Record<string, string>;
  onChange: (value: string) => void;
  hint?: any;
}

/** ui/field.js */
interface NumberFieldProps {
  label: string;
  value: number | undefined;
  onChange: (value: number | undefined) => void;
  hint?: any;
  /** of the input */
  [attribute: string]: any;
}

/** ui/field.js */
interface CheckProps {
  label: string;
  checked: boolean;
  onChange: (checked: boolean) => void;
}

/** ui/field.js */
interface SegmentedProps {
  label: string;
  value: string;
  options: SelectProps["options"];
  onChange: (value: string) => void;
}

/** ui/slider.js */
interface SliderProps {
  label: string;
  value: number;
  onChange: (value: number) => void;
  min?: number;
  max?: number;
  step?: number;
  hideLabel?: boolean;
}

/** views/gallery.js */
interface GalleryFilters {
  /** words of prompts, LoRAs, models, names */
  q: string;
  lora: string;
  model: string;
  /** its id */
  album: string;
  starred: boolean;
  trashed: boolean;
}

/** A name with the number of its images. */
interface Counted {
  name: string;
  images: number;
}

interface Album extends Counted {
  id: string;
  created: number;
  /** address of an image */
  cover: string | null;
}

/** views/gallery/state.js */
interface GalleryState {
  filters: GalleryFilters;
  /** null until loaded */
  images: GalleryRow[] | null;
  /** where the list continues */
  next: string | null;
  total: number;
  facets: { images: number; bytes: number; starred: number; trashed: number; trash_days: number; models: Counted[]; loras: Counted[] } | null;
  albums: Album[];
  /** ids */
  selected: Set<string>;
  /** the one that was selected last: where a range begins */
  anchor: string | null;
}

/** views/gallery.js */
interface TileProps {
  row: GalleryRow;
  selected: boolean;
  /** whether any image is selected: a click selects */
  selecting: boolean;
  open: (id: string) => void;
}

/** views/compare.js */
interface SheetProps {
  sheet: Sheet;
  made: Record<string, any>;
  slider: boolean;
  prompt: string;
}

/** views/library/details.js */
interface DetailsProps {
  id: string;
  twins: Twins;
  onClose: () => void;
}

/** views/library.js */
interface LibraryFilters {
  query: string;
  base: string;
  only: string;
  sort: string;
  layout: string;
}

/** views/library.js */
interface FiltersProps {
  loras: Lora[];
  twins: Twins;
  filters: LibraryFilters;
  change: (patch: Partial<LibraryFilters>) => void;
}

/** views/train/captions.js */
interface TextProps {
  label: string;
  value: string;
  onChange: (value: string) => void;
  class?: string;
  [attribute: string]: any;
}

/** views/train/pad.js */
interface PadProps {
  onAdd: (image: Blob, caption: string) => Promise<any>;
  onClose: () => void;
  added: number;
}

/** views/train/images.js */
interface CardProps {
  dataset: Dataset;
  image: DatasetImage;
  crop: Crop | undefined;
}

/** views/train/run.js */
interface ExtendProps {
  id: string;
  done: number;
  onClose: () => void;
  onJob: (id: string) => void;
}

/** views/train/setup.js */
interface MoreProps {
  form: RunForm;
  options: TrainOptions | null;
  preset: Record<string, any>;
  change: (patch: Partial<RunForm>) => void;
}

// Of single views.

type Message = { id: number, kind: "info" | "error" | "warning", text: string, details?: string[], action?: { label: string, run: () => void }, /** the message ends once this is true */ until?: (state: AppState) => boolean | undefined };
type Upload = { key: number, name: string, size: number, state: "waiting" | "sending" | "added" | "refused", reason?: string, id?: string };
type LossPoint = { step: number, loss: number | null, loss_average: number | null };
/** Pointers, keys and the brush on the canvas of Edit. */
type Hand = {
  pointers: Map<number, Point>,
  mode: "" | "paint" | "pan" | "pinch",
  last: Point | null,
  erase: boolean,
  /** whether the pointer is over the canvas */
  over: boolean,
  /** whether the space bar is held */
  space: boolean,
  /** where the arrow keys are */
  cursor: Point | null
};
type OpenDataset = {
  dataset: Dataset | null,
  crops: Map<string, Crop> | null,
  undo: { label: string, before: Labels }[],
  uploads: Uploads | null,
  /** the last report, and the settings and captions it was made for */
  checked: { key: string, report: CheckReport } | null,
  /** those of the running check */
  checking: string
};
/** The loss on images that are held out. */
type Validation = { step: number, loss: number };
type RunState = {
  points: LossPoint[],
  validations: Validation[],
  samples: Sample[],
  checkpoints: number[],
  notes: string[],
  phase: string,
  step: number,
  total: number,
  eta: number | null,
  preparing: { done: number, total: number, activity: string } | null,
  end: string | null
};
type Stroke = (context: CanvasRenderingContext2D) => void;
type Sample = { step: number, index: number, url: string };
type TrainOptions = { own: Record<string, any>, presets: { name: string, settings: Record<string, any> }[], settings: { name: string, default: any, schema: any }[] };
type DatasetImage = { name: string, caption: string, width: number, height: number, size: number, modified: number };
type Dataset = { id: string, name: string, built_in: boolean, pictures: DatasetImage[] };
type Crop = { name: string, bucket: string | null, resized: number[], crop: number[], cropped: number, own_bucket: boolean };
type RunForm = { name: string, model: string, preset: string, trigger: string, prompts: string, overrides: Record<string, any> };
type Uploads = { total: number, done: number, failures: { name: string, message: string }[] };
type Cell = { image?: any, preview?: string, error?: string };
type Choice = { name: string, strength: number, te?: number, unet?: number };
type CompareForm = { mode: string, prompt: string, seed: number, steps?: number, count: number, loras: Choice[], more: Record<string, any> };
type Sheet = { columns: string[], labels: string[], rows: Record<string, any>[][] };
type PromptProps = { prompt: string, onPrompt: (prompt: string) => void };
type GalleryProps = { images: GalleryImage[], selected: string | null, onSelect: (item: GalleryImage) => void };
type Theme = "auto" | "light" | "dark";
/** Loads the module of a view. */
type Loader = () => Promise<{ View: () => any }>;
/** JSON whose fields are not listed here. */
type Fields = Record<string, any>;
/** textOwn: text fields have the same shortcut, and keep it */
type ShortcutRow = readonly [keys: string, label: string, run: (event: KeyboardEvent) => void, textOwn?: boolean];
/** Corners on a circle; every second one at `inner` radii. */
type StampShape = { corners: number, inner?: number, turn?: number };
type Painter = (context: CanvasRenderingContext2D, width: number, height: number) => void;
/** of useBusy in ui/form.js */
type Busy = [busy: boolean, during: (promise: Promise<any>) => Promise<any>];
type EmptyProps = { name: string, title: string, text?: any, children?: any };
type FieldProps = { label: string, hint?: any, children: (id: string) => any };
type Params = Record<string, string>;
type Route = { view: string, params: Params };
type ServerEvent = { id: string, event: string, data: string };
/** LoRAs with the same contents, by the id of each. */
type Twins = Map<string, Lora[]>;
/** The query of an address; empty values are left out. */
type Query = Record<string, string | number | null | undefined>;

/** Labels by the name that the API, an address or a setting has for a thing. */
type Labels = Record<string, string>;
type Of<T> = (value: T) => string;
type Words = { [name: string]: unknown };
/** views/gallery/strings.js */
interface GalleryPhrases extends Words {
  count: (n: number, size: string) => string;
  found: Of<number>;
  inTrash: (n: number, days: number) => string;
  trash: Of<number>;
  refreshed: (read: number, missing: number) => string;
  skipped: Of<number>;
  open: Of<string>;
  select: Of<string>;
  star: Of<string>;
  unstar: Of<string>;
  selected: Of<number>;
  restored: Of<number>;
  purgeTitle: Of<number>;
  purged: Of<number>;
  albums: Words & { title: Of<number>; added: (n: number, name: string) => string; removed: Of<number>; deleteTitle: Of<string>; deleted: Of<string>; images: Of<number> };
  imports: Words & { progress: (done: number, total: number) => string; done: (added: number, known: number) => string; refused: Of<number>; ignored: Of<number>; tooLarge: Of<string> };
  viewer: Words & { place: (index: number, total: number) => string; zoom: Of<number> };
}
/** The texts with values in them: their parameters. */
interface Phrases {
  app: Words & { notReady: Of<string> };
  nav: Words;
  session: Words;
  keys: Words & { view: Of<string> };
  actions: Words;
  errors: Words & { http: Of<number> };
  generate: Words & {
    moreWords: Of<number>;
    reorder: Of<string>;
    apart: Of<string>;
    removeLora: Of<string>;
    strengthOf: Of<string>;
    madeFor: Of<string>;
    hidden: (n: number, reasons: string) => string;
    moreLoras: Of<number>;
    queued: Of<number>;
    step: (step: number, total: number) => string;
    left: Of<string>;
    keptFor: Of<number>;
    trashed: Of<number>;
    imageOf: (prompt: string, seed: number) => string;
    changed: (modules: number, all: number) => string;
    made: Of<string>;
  };
  queue: Words & {
    cancel: Of<string>;
    move: Of<string>;
    training: Of<string>;
    images: Of<number>;
    resources: Of<ClusterNode>;
    holds: Of<string[]>;
    waitsFor: Of<string>;
  };
  compare: Words & { lora: Of<number>; seedOf: Of<number>; left: Of<number> };
  edit: Words & { unreadable: Of<string>; scaled: (from: string, to: string) => string; share: Of<number> };
  library: Words & {
    count: (all: number, shown: number) => string;
    anyBase: Of<number>;
    problems: Of<number>;
    duplicates: Of<number>;
    problem: Of<number>;
    rank: Of<number[]>;
    more: Of<number>;
    samples: Words & {
      make: Of<number>;
      progress: (done: number, total: number) => string;
      with: Of<number>;
      made: (prompt: string, seed: number, model: string) => string;
    };
    tooLarge: Of<string>;
    deleted: Of<string>;
    deleteTitle: Of<string>;
    metadata: Of<number>;
    sure: Of<number>;
    modules: (modules: number, tensors: number, dtypes: string) => string;
    moreWords: Of<number>;
    copied: Of<string>;
    downloadAs: (name: string, size: string) => string;
    leftOut: (n: number, reason: string) => string;
    fits: (name: string, tensors: number) => string;
    fitsNot: (name: string, placed: number, all: number) => string;
    nonfinite: Of<number>;
    unused: Of<number>;
    placements: Of<number>;
    rows: (first: number, last: number) => string;
  };
  train: Words & {
    newName: Of<number>;
    count: Of<number>;
    deleteTitle: Of<string>;
    sending: (done: number, total: number) => string;
    ignored: Of<number>;
    bucket: (size: string, n: number) => string;
    tooSmall: Of<number>;
    cropped: Of<number>;
    remove: Of<string>;
    captionOf: Of<string>;
    captions: Words & { apply: Of<number>; more: Of<number>; undo: Of<string>; write: Of<number>; writing: (done: number, total: number) => string };
    setup: Words & { presetHint: (steps: number, rank: number) => string; ready: (time: string | undefined) => string; problems: Of<number> };
    report: Words & {
      of: (needed: string, total: string, device: string) => string;
      about: Of<string>;
      epochs: (steps: number, epochs: number) => string;
    };
    run: Words & {
      useStep: Of<number>;
      bestBy: Of<boolean>;
      lossOf: (value: string, validation: boolean) => string;
      imageOf: Of<number>;
      extendText: Of<number>;
      sampleOf: (prompt: string, step: number) => string;
      step: Of<number>;
      notes: Of<number>;
    };
    chart: Words & {
      summary: (first: number, from: string, last: number, to: string, least: string) => string;
      step: Of<number>;
      loss: Of<string>;
      average: Of<string>;
      validation: Of<string>;
    };
    pad: Words & { canvas: Of<number>; of: Of<string>; add: Of<number>; added: Of<number> };
  };
}
